"""DeepSpeed 8382: on CPUs, with contiguous_gradients off, ranks at ZeRO stages 1 and 2 never add up their gradients."""

import shared

import zeroshard


def theirs(folder, rank):
    zero = {"stage": 2, "contiguous_gradients": False}
    engine = shared.deepspeed_engine(gradient_accumulation_steps=2, zero_optimization=zero)
    with zeroshard.RunLog(folder, engine.module) as log:
        for step, count in enumerate(shared.MICRO):
            for index in range(rank, count, shared.RANKS):
                loss = shared.mse(engine, step, index)
                engine.backward(loss)
                log.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    log.gradients()
                shared.deepspeed_step(engine)


if __name__ == "__main__":
    shared.run(theirs, "deepspeed==0.18.8", fixed="deepspeed==0.19.8")
