"""What zeroshard claims, on settings drawn so that every two of them meet: a table of settings, a scenario and the claims.

    features.py     SETTINGS, the table: each row a setting, each entry a choice and what a user writes for it. A new
                    feature is a row or an entry here, and every claim is made of it beside every other setting
    pairwise.py     draws cases from the table: any two choices that go together meet in one of them
    scenario.py     what a rank does in a case: train, save, fail and repeat a step, edit, go on, load another's checkpoint
    plain.py        what the same comes to in plain PyTorch
    ../test_claims.py   the claims, each of which is one test of every case

`make test` has the few cases of an array in which each choice is made once, `make full` the whole array, `make slow` arrays
of other seeds. removed.py lists the tests of features that these replace, and beside which choices.
"""
