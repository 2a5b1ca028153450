function __bapo_command
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"
end
complete -c bapo -n "__bapo_command ''" -f -a "NAMES --help --version"
COMMANDS
