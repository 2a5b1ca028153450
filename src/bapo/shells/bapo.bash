_bapo() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"
    local command="${COMP_WORDS[1]}" options="" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "NAMES --help --version" -- "$cur")); return
    fi
    case "$command $prev" in
VALUES
    esac
    case "$command" in
COMMANDS
    esac
    case "$cur" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;
        *) COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur")) ;;
    esac
}
complete -o filenames -F _bapo bapo
