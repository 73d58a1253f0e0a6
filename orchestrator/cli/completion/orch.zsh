#compdef orch
# Completion of `orch` in zsh, after compinit:  eval "$(orch completion zsh)"
_orch() {
    local kind value text files=0
    local -a words_done shown_done words_open shown_open
    while IFS=$'\t' read -r kind value text; do
        case "$kind" in
            word) words_done+=("$value"); shown_done+=("$value${text:+  -- $text}") ;;
            open) words_open+=("$value"); shown_open+=("$value${text:+  -- $text}") ;;
            file) files=1 ;;
        esac
    done < <(_ORCH_COMPLETE="${(j: :)words[1,CURRENT-1]} $PREFIX" "$words[1]" 2>/dev/null)
    (( $#words_done )) && compadd -l -d shown_done -- $words_done
    (( $#words_open )) && compadd -l -S '' -d shown_open -- $words_open
    (( files )) && _files
    return 0
}
if [ "$funcstack[1]" = "_orch" ]; then
    _orch "$@"
else
    compdef _orch orch
fi
