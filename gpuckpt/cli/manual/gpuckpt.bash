# bash completion for gpuckpt. It only asks the program.
_gpuckpt_completion() {
    local line=${COMP_LINE:0:COMP_POINT} words current before answer value wide=0 i IFS
    # By blanks: COMP_WORDS is broken at every @, : and = as well, and user@host: is one word.
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[${#words[@]} - 1]}
    # fish's way to ask, because that is answered with a description behind a tab.
    answer=$(_TYPER_COMPLETE_ARGS="${words[*]}" _TYPER_COMPLETE_FISH_ACTION=get-args _GPUCKPT_COMPLETE=complete_fish "$1" 2>/dev/null)
    IFS=$'\n'
    # shellcheck disable=SC2206  # split at line ends on purpose
    COMPREPLY=($answer)
    # bash puts an answer in the place of what stands behind the last of its word breaks.
    before=${current%"${current##*["$COMP_WORDBREAKS"]}"}
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    # 63, 33, 64: a list is shown. Nothing that is put into the line may have a description.
    if [[ ${#COMPREPLY[@]} -gt 1 && $COMP_TYPE == @(63|33|64) && $current != -* ]]; then
        for value in "${COMPREPLY[@]%%$'\t'*}"; do ((${#value} > wide)) && wide=${#value}; done
        for i in "${!COMPREPLY[@]}"; do
            [[ ${COMPREPLY[i]} == *$'\t'* ]] || continue
            printf -v value "%-${wide}s  (%s)" "${COMPREPLY[i]%%$'\t'*}" "${COMPREPLY[i]#*$'\t'}"
            COMPREPLY[i]=${value:0:${COLUMNS:-80}}
        done
    else
        COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
    fi
    # A directory and a host are gone on with.
    [[ ${COMPREPLY[0]} == *[:/] ]] && compopt -o nospace 2>/dev/null
    # Nobody is asked what there is behind user@host: and files of this host are no answer.
    [[ ${#COMPREPLY[@]} -eq 0 && ${current%%/*} == *:* ]] && compopt +o default 2>/dev/null
    return 0
}

complete -o default -F _gpuckpt_completion gpuckpt
