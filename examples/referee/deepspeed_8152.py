"""DeepSpeed 8152: each pipeline stage before the last divides once more by the accumulation steps."""

import shared
import torch
import torch.distributed as dist
from torch.nn import functional as F

import zeroshard


def theirs(folder, rank):
    import deepspeed.pipe

    shared.deepspeed_start()
    halves = {"num_stages": 2, "partition_method": "uniform"}
    stage = deepspeed.pipe.PipelineModule([*shared.build()], loss_fn=F.mse_loss, **halves)
    engine = shared.deepspeed_engine(stage, gradient_accumulation_steps=4)
    own, whole = dict(stage.named_parameters()), shared.build()  # the log gets the tensors of both ranks

    def tensors(part):
        for name, param in whole.named_parameters():
            found = part(own[name]).clone() if name in own else torch.zeros_like(param)
            dist.all_reduce(found)
            yield param, found

    def gradients(*_):
        for param, grad in tensors(lambda param: param.grad):
            param.grad = grad
        log.gradients()

    engine.optimizer.register_step_pre_hook(gradients)
    with zeroshard.RunLog(folder, whole) as log:
        for step, count in enumerate(shared.MICRO):
            engine.train_batch(iter([shared.batch(step, index) for index in range(count)]))
            for param, weight in tensors(lambda param: param.detach()):
                param.data.copy_(weight)


if __name__ == "__main__":
    shared.run(theirs, "deepspeed==0.18.8", fixed="deepspeed==0.19.8")
