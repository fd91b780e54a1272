"""The page that walks through a run, number by number, and the published ZeRO walkthroughs that ship with it.

The texts' models are plain modules with the numbers that those texts print, sharded like any other. Where a text
leaves a value out, the module that holds it says so and where its own value comes from.

    transformer260   260 parameters     "ZeRO-1: A Concrete Walkthrough" and its ZeRO-2 sequel
    four_weights     w1, w2, w3, w4     a walk by hand through stages 1, 2 and 3 with activation checkpointing
    stacked_mlp      4,251 and more     ZeRO-1 as Buffer, DDP and Distributed Optimizer
    frames           held gradients, tensor by tensor, as arithmetic on a layout

These files turn them, and any run, into the page; the names are those of `web/DATA.md`.

    document         the page: its template, and the JSON inside it
    recording        one recorded step: what was held, what moved, why the peak is where it is
    run              a run of the user's, from all ranks or from a folder; `shape` checks the latter
    observe          looking into a small run while it happens, on a clock of ticks
    walk260, walk4, walk_layers, overview       one walkthrough each: run it on two ranks, tell it
    run260, words260                            of the first: what each rank sees, and what is said of it
    played260, owned                            its steps beside the texts' own; who owns what under either cut
    build            `python -m zeroshard.explain.build` writes walkthroughs.json
"""
