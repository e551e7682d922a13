#compdef thaw
# Completion of thaw for zsh. Load it with: source <(thaw completion zsh)
_thaw() {
    local line
    local -a found candidates
    found=("${(@f)$(${(Q)words[1]} __complete -- "${(@Q)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
    for line in $found; do
        if [[ $line == :files ]]; then
            _files
            return
        fi
        candidates+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    (( $#candidates )) && _describe thaw candidates
}
if [[ ${funcstack[1]-} == _thaw ]]; then
    _thaw "$@"
else
    compdef _thaw thaw
fi
