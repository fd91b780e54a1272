"""The page that walks through a run, number by number, with the published walkthroughs that ship in it.

    document         the page: its template, and the JSON inside it; the names are those of `web/DATA.md`
    recording        one recorded step: what was held, what moved, why the peak is where it is
    run              a run of the user's, from all ranks or from a folder; `shape` checks the latter
    stacked_mlp      a model of 4,251 parameters and more, "ZeRO-1 as Buffer, DDP and Distributed Optimizer"

The walkthroughs in walkthroughs.json are made by `web/walkthroughs/`.
"""
