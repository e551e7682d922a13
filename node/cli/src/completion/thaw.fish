# Completion of thaw for fish. Load it with: thaw completion fish | source
function __thaw_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    test (count $current) -gt 0; or set current ""
    set -l found ($words[1] __complete -- $words[2..-1] $current 2>/dev/null)
    if test "$found[1]" = :files
        __fish_complete_path $current
    else
        printf '%s\n' $found
    end
end
complete -c thaw -f -a '(__thaw_complete)'
