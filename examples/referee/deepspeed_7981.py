"""DeepSpeed 7981: with offload_optimizer and a boundary that the loop sets, only the last backward counts."""

import shared

import zeroshard


def theirs(folder, rank):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = shared.deepspeed_engine(gradient_accumulation_steps=1, zero_optimization=zero)
    with zeroshard.RunLog(folder, engine.module) as log:
        for step, count in enumerate(shared.MICRO):
            for index in range(rank, count, shared.RANKS):
                engine.set_gradient_accumulation_boundary(index + shared.RANKS >= count)
                loss = shared.mse(engine, step, index)
                engine.backward(loss * shared.RANKS / count)
                log.backward(loss)
            log.gradients()
            shared.deepspeed_step(engine)


if __name__ == "__main__":
    shared.run(theirs, "deepspeed==0.18.8", fixed="deepspeed==0.19.8")
