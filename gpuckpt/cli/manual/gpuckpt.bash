# bash completion for gpuckpt. It only asks the program.
_gpuckpt_completion() {
    local line=${COMP_LINE:0:COMP_POINT} words current before answer IFS
    # By blanks: COMP_WORDS is broken at every @, : and = as well, and user@host: is one word.
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[${#words[@]} - 1]}
    answer=$(COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) _GPUCKPT_COMPLETE=complete_bash "$1" 2>/dev/null)
    IFS=$'\n'
    # shellcheck disable=SC2206  # split at line ends on purpose
    COMPREPLY=($answer)
    # bash puts an answer in the place of what stands behind the last of its word breaks.
    before=${current%"${current##*["$COMP_WORDBREAKS"]}"}
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    # A directory and a host are gone on with.
    [[ ${COMPREPLY[0]} == *[:/] ]] && compopt -o nospace 2>/dev/null
    # Nobody is asked what there is behind user@host: and files of this host are no answer.
    [[ ${#COMPREPLY[@]} -eq 0 && ${current%%/*} == *:* ]] && compopt +o default 2>/dev/null
    return 0
}

complete -o default -F _gpuckpt_completion gpuckpt
