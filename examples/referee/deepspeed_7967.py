"""DeepSpeed 7967: with offload_optimizer, the micro-batches between the first and the last do not count."""

import shared

import zeroshard

MICRO = [8, 8]  # four of each rank


def theirs(folder, rank):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = shared.deepspeed_engine(gradient_accumulation_steps=4, zero_optimization=zero)
    with zeroshard.RunLog(folder, engine.module) as log:
        for step, count in enumerate(MICRO):
            for index in range(rank, count, shared.RANKS):
                loss = shared.mse(engine, step, index)
                engine.backward(loss)
                log.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    log.gradients()
                shared.deepspeed_step(engine)


if __name__ == "__main__":
    shared.run(theirs, "deepspeed==0.18.8", fixed="deepspeed==0.19.8", micro=MICRO)
