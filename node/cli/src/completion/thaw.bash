# Completion of thaw for bash. Load it with: source <(thaw completion bash)
_thaw() {
    local line=${COMP_LINE:0:COMP_POINT} current found=() words=()
    # Words as typed, because bash would also split them at : and =, which image names and flags contain.
    read -ra words <<<"$line"
    [[ $line != *[[:space:]] ]] || words+=("")
    current=${words[-1]}
    mapfile -t found < <("${words[0]}" __complete -- "${words[@]:1}" 2>/dev/null | cut -f1)
    COMPREPLY=()
    if [[ ${found[0]-} == :files ]]; then
        compopt -o default
        return
    fi
    # bash replaces only what follows the last : or = of the word.
    local before=
    if [[ $current == *[:=]* ]]; then before=${current%"${current##*[:=]}"}; fi
    COMPREPLY=("${found[@]#"$before"}")
}
complete -F _thaw thaw
