"""The first hour on a machine with GPUs, as steps; `make gpu` runs them, `make gpu DEVICE=emu` rehearses them on none.

    steps        the table of them: what each is for, how many devices it takes, and for how long
    __main__     runs each in a process of its own, one after the other, also after failures
    place        where: CUDA devices, the emulated one of tests/emulated, or the CPU; and ranks on them
    record       what a step writes: gpu-results/NN-name.json, row by row
    training     what is trained in the steps that compare bits

Nothing here needs a network. A step that ends in any way leaves what it has written, and the next one begins.
"""
