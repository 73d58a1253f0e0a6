# Completion of `orch` in fish:  orch completion fish > ~/.config/fish/completions/orch.fish
function __orch_complete
    set -l program (commandline -opc)[1]
    env _ORCH_COMPLETE=(commandline -cp | string collect) $program 2>/dev/null | while read -l -d \t kind value text
        switch $kind
            case word open
                printf '%s\t%s\n' $value $text
            case file
                __fish_complete_path (commandline -ct)
        end
    end
end
complete -c orch -f -a '(__orch_complete)'
