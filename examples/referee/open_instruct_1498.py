"""open-instruct 1498: several backwards for one step at ZeRO stage 2, with gradient_accumulation_steps 1."""

import shared

import zeroshard


def theirs(folder, rank):
    engine = shared.deepspeed_engine(gradient_accumulation_steps=1, zero_optimization={"stage": 2})
    with zeroshard.RunLog(folder, engine.module) as log:
        for step, count in enumerate(shared.MICRO):
            for index in range(rank, count, shared.RANKS):  # each backward is a boundary: nothing says otherwise
                loss = shared.mse(engine, step, index)
                engine.backward(loss * shared.RANKS / count)
                log.backward(loss)
            log.gradients()
            engine.step()


if __name__ == "__main__":
    shared.run(theirs, "deepspeed==0.19.8")
