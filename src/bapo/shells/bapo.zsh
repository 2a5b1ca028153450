_bapo() {
    local -a options names
    if (( CURRENT == 2 )); then
        compadd -- NAMES --help --version; return
    fi
    case "$words[2] $words[CURRENT-1]" in
VALUES
    esac
    case "$words[2]" in
COMMANDS
    esac
    if [[ $PREFIX == -* ]]; then
        compadd -- $options
    else
        (( $#names )) && compadd -- $names
        _files
    fi
}
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
compdef _bapo bapo
