# train_grpo.py
import argparse
import re

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""
NAME = "Qwen2.5-1.5B-Instruct"
MODEL = "Qwen/" + NAME
PATTERN = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)


def extract_xml_answer(text: str) -> str:
    answer = text.split("<answer>")[-1]
    return answer.split("</answer>")[0].strip()


def extract_hash_answer(text: str) -> str | None:
    return text.split("####")[1].strip() if "####" in text else None


def get_gsm8k_questions(split="train") -> Dataset:
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(
        lambda x: {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": x["question"]}],
            "answer": extract_hash_answer(x["answer"]),
        }
    )


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if extract_xml_answer(r) == a else 0.0 for r, a in zip(responses, answer, strict=True)]


def format_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if PATTERN.search(c[0]["content"]) else 0.0 for c in completions]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--run-name", type=str, required=True)
    parser.add_argument("--beta", type=float, default=0.04)
    args = parser.parse_args()
    per_device, num_generations = 4, 8
    training_args = GRPOConfig(
        output_dir=f"outputs/{NAME}",
        run_name=args.run_name,
        learning_rate=args.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.1,
        warmup_ratio=0.1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        bf16=True,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=2 * 2,
        num_generations=num_generations,
        num_iterations=2,
        max_prompt_length=256,
        max_completion_length=786,
        max_steps=500,
        save_steps=100,
        max_grad_norm=0.1,
        beta=args.beta,
        epsilon=0.2,
        epsilon_high=0.28,
        top_p=0.95,
        reward_weights=[1.0, 0.5],
        mask_truncated_completions=True,
        report_to=["wandb", "comet_ml"],
        log_on_each_node=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        push_to_hub=torch.cuda.is_available(),
    )
    training_args.seed = 7
    peft_config = LoraConfig(
        r=16,
        lora_alpha=64,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.05,
    )
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, torch_dtype=torch.bfloat16, attn_implementation="sdpa", device_map=None
    ).to("cuda")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[correctness_reward_func, format_reward_func],
        args=training_args,
        train_dataset=get_gsm8k_questions(),
        peft_config=peft_config,
    )
    trainer.train()


if __name__ == "__main__":
    main()
