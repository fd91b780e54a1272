"""The walkthroughs of the page: run on local ranks, and written into the package. In web/: python -m walkthroughs.build

The texts' models are plain modules with the numbers that those texts print, sharded like any other. Where a text
leaves a value out, the module that holds it says so and where its own value comes from.

    transformer260   260 parameters     "ZeRO-1: A Concrete Walkthrough" and its ZeRO-2 sequel
    four_weights     w1, w2, w3, w4     a walk by hand through stages 1, 2 and 3 with activation checkpointing
    observe          looking into a small run while it happens, on a clock of ticks
    walk260, walk4, walk_layers, overview       one walkthrough each: run it on two ranks, tell it
    run260, words260                            of the first: what each rank sees, and what is said of it
    played260, owned                            its steps beside the texts' own; who owns what under either cut
    faults260, words_of_faults                  faults that are caused in it, and what is said of them
    texts, frames    the numbers of the texts' tables, recomputed; D's table of gradients, frame by frame
    build            writes walkthroughs.json; the names are those of `web/DATA.md`
"""
