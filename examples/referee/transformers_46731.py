"""transformers 46731: with label smoothing, the Trainer's gradients grow with the accumulation steps."""

from functools import partial

import shared
import torch
from transformers import PretrainedConfig, Trainer, TrainingArguments

import zeroshard


class Model(shared.Tokens):
    config = PretrainedConfig()  # which this version asks for

    def forward(self, input_ids, **loss_options):  # as most causal language models take num_items_in_batch
        return {"logits": super().forward(input_ids)}


class Logged(Trainer):
    def get_train_dataloader(self):
        return [shared.tokens(step, index, 0) for step, count in enumerate(shared.MICRO) for index in range(count)]

    def training_step(self, *inputs, **more):
        loss = super().training_step(*inputs, **more)
        self.run_log.backward(loss)
        return loss


def theirs(folder, rank):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = TrainingArguments(
        str(folder.parent / "trainer"), gradient_accumulation_steps=4, max_steps=2, max_grad_norm=0.0, use_cpu=True,
        label_smoothing_factor=0.1, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Logged(model, settings, optimizers=(optimizer, schedule))
    with zeroshard.RunLog(folder, model, optimizer) as trainer.run_log:
        trainer.train()


if __name__ == "__main__":
    loss_of = partial(shared.token_loss, padding=0, smoothing=0.1)
    versions = {"engine": "transformers==5.13.1", "fixed": "transformers==5.23.0"}
    shared.run(theirs, **versions, ranks=1, build=shared.Tokens, loss_of=loss_of)
