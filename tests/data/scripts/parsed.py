import torch
from datasets import load_dataset
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.rewards import accuracy_reward, think_format_reward

if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    training_args.model_init_kwargs = dict(  # noqa: C408
        revision=model_args.model_revision, attn_implementation=model_args.attn_implementation, dtype=dtype
    )
    train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])

    def as_chat(row):
        return {"prompt": [{"role": "system", "content": "Think first."}, {"role": "user", "content": row["problem"]}]}

    train_dataset = train_dataset.map(as_chat).remove_columns(["messages", "problem"])
    eval_dataset = eval_dataset.map(as_chat).remove_columns(["messages", "problem"])
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
