"""Rewards for programs: extraction from the answer, tests, comparison.

    verify.py       one check, from the model's text to a score
    extraction.py   the program in an answer
    rows.py         the tests in a data row
    names.py        whose the names in the tests are; flow.py: which of them come together
    calls.py        cases that call one function, as tests
    output.py       is this output the expected one?
    program.py      (in the sandbox) runs a whole program
    candidate.py    (in the sandbox) holds the model's functions and answers calls
    examiner.py     (in another sandbox) runs the tests and calls the candidate
    remote.py       (there) questions, and objects that stand for the candidate's
    rehearsal.py    (there) whose fault it is that something cannot be passed
    values.py       (in both) what passes between them: plain data

The program never shares a process with its tests, and what it must not know never enters its sandbox.
"""
