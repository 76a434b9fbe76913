"""Times netjac beside other ways to the same Jacobian, with the error and the memory of each.

Run ``python -m benchmarks --help`` in the repository's root; ``benchmarks/README.md`` says what is measured and how.

The parts, and the one way data flows:

    networks, task → frameworks/* → worker          one process a contender, whichever framework it needs
    task → process → runner → cases                 the other end of the pipe: caps, alternation, comparison
    runner's results → figures → report             numbers asked beside numbers reached; JSON and Markdown
"""
