"""Processes of yatt that tests start: forked from one that has imported everything, as if they were started.

A whole run starts eight processes or more, and most of what they cost is imports. So each process of pytest
has a *stem* (`tests.forked.stem`), which imports once. What is forked from it is a child of who asked for it,
with the words, variables, descriptors and limits that a started process would have. Commands and controllers
get a stem of their own, so that everything below them is forked too. A lot decides for each test whether its
processes are forked or started (`tests.forked.lots`): only a started one notices an import that it lacks.
"""
