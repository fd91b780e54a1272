"""DeepSpeed 7718: at ZeRO stage 2 only the last micro-batch of a step counts."""

import shared

import zeroshard


def theirs(folder, rank):
    engine = shared.deepspeed_engine(gradient_accumulation_steps=2, zero_optimization={"stage": 2})
    with zeroshard.RunLog(folder, engine.module) as log:
        for step, count in enumerate(shared.MICRO):
            for index in range(rank, count, shared.RANKS):
                loss = shared.mse(engine, step, index)
                engine.backward(loss)
                log.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    log.gradients()
                engine.step()


if __name__ == "__main__":
    shared.run(theirs, "deepspeed==0.18.2", fixed="deepspeed==0.19.8")
