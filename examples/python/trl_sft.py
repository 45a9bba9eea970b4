"""Fine-tunes a chat model with TRL and sparse attention, as an adapter that phsa reads.

    pip install '.[train]' trl peft datasets
    python examples/python/trl_sft.py HuggingFaceTB/SmolLM2-135M-Instruct chats.jsonl adapter --steps 100
    phsa run -m smollm2-135m --adapter adapter -f DOCUMENT -p QUESTION

chats.jsonl has one conversation a line: {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}.
Only the last answer of each is learned.
"""

import argparse

import datasets
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import phsa.hf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face folder or name")
    parser.add_argument("chats", help="a file of JSON lines with messages")
    parser.add_argument("out", help="the adapter's folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence; longer ones are cut")
    parser.add_argument("--top-k", type=int, default=2, help="blocks that a query chooses")
    parser.add_argument("--report-to", default="none", help="tensorboard, wandb: what is installed")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    phsa.hf.enable(model, tokenizer=tokenizer, top_k=args.top_k, init=16, local=128)

    chats = datasets.load_dataset("json", data_files=args.chats, split="train")
    # The part before the last answer is the prompt, which is read but not learned.
    chats = chats.map(
        lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]},
        remove_columns=chats.column_names,
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=chats,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=SFTConfig(
            output_dir=args.out,
            max_steps=args.steps,
            max_length=args.length,
            completion_only_loss=True,
            per_device_train_batch_size=1,
            learning_rate=1e-4,
            logging_steps=10,
            save_strategy="no",
            report_to=args.report_to,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.train()
    # With it goes phsa.json, the attention that it was trained with.
    trainer.model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
