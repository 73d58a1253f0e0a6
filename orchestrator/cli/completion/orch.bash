# Completion of `orch` in bash 4.4 or newer:  eval "$(orch completion bash)"
_orch_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" word before kind value
    word="${line##*[[:space:]]}"
    # bash ends a word at each of these characters and replaces only what follows the last one; an @ goes with it.
    before="${word%"${word##*["$COMP_WORDBREAKS"]}"}"
    before="${before%@}"
    COMPREPLY=()
    compopt -o nospace
    while IFS=$'\t' read -r kind value _; do
        case "$kind" in
            word) COMPREPLY+=("${value#"$before"} ") ;;
            open) COMPREPLY+=("${value#"$before"}") ;;
            file) compopt -o default +o nospace ;;
        esac
    done < <(_ORCH_COMPLETE="$line" "$1" 2>/dev/null)
}
complete -F _orch_completion orch
