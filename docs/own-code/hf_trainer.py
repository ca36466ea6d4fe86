"""Masked language modelling in the style of transformers' documentation: torchrun --nproc-per-node 2 hf_trainer.py 3"""

import os
import sys

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

WORDS, MASK, IGNORED = 50, 1, -100


class Sentences(Dataset):
    """Sentences that count upwards from word to word; some words are masked, others at each pass."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        words = 2 + (index + torch.arange(12)) % (WORDS - 2)
        masked = torch.rand(12) < 0.15
        masked[index % 12] = True
        return {"input_ids": words.where(~masked, torch.tensor(MASK)), "labels": words.where(masked, IGNORED)}


def main(epochs):
    set_seed(3)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **size))
    args = TrainingArguments(
        output_dir="output",
        num_train_epochs=epochs,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)),
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=4,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
    )
    trainer.train()
    trainer.save_model("output/final")


if __name__ == "__main__":
    main(int(sys.argv[1]))
