"""The models of five published ZeRO walkthroughs, as plain modules with the numbers those texts print.

    transformer260   260 parameters     "ZeRO-1: A Concrete Walkthrough" and its ZeRO-2 sequel
    four_weights     w1, w2, w3, w4     a walk by hand through stages 1, 2 and 3 with activation checkpointing
    stacked_mlp      4,251 and more     ZeRO-1 as Buffer, DDP and Distributed Optimizer
    frames           held gradients, tensor by tensor, as arithmetic on a layout

Nothing here knows how the engine works: the models are sharded like anybody's. Where a text leaves a value out, the
module that holds it says so and where its own value comes from.
"""
