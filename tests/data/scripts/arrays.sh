#!/usr/bin/env bash
set -euo pipefail

device=${device:-$(command -v npu-smi >/dev/null && echo npu || echo gpu)}
model=${model:-Qwen/Qwen3-4B}
folder=${folder:-$HOME/data/gsm8k}
train=${train:-$folder/train.parquet}
batch=${batch:-512}
lr=${lr:-1e-6}
share_of_memory=${share_of_memory:-0.6}
gpus=${gpus:-8}

case "$device" in
    npu)
        gpus=16
        share_of_memory=0.9
        ;;
esac

data=(
    algorithm.adv_estimator=grpo
    data.train_files=${train}
    data.val_files=${folder}/test.parquet
    data.train_batch_size=${batch}
    data.max_prompt_length=1024
    data.max_response_length=$((512 * 2))
    data.filter_overlong_prompts=True
    data.truncation='error'
    algorithm.use_kl_in_reward=False
)
policy=(
    actor_rollout_ref.model.path=${model}
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=${lr}
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000
    actor_rollout_ref.actor.use_dynamic_bsz=True
)
sampler=(
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=${share_of_memory}
    actor_rollout_ref.rollout.enable_chunked_prefill=False
    actor_rollout_ref.rollout.enforce_eager=False
    actor_rollout_ref.rollout.free_cache_engine=True
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4096
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8192
)
trainer=(
    trainer.critic_warmup=0
    trainer.logger='["console","wandb"]'
    trainer.project_name=gsm8k
    trainer.experiment_name=qwen3
    trainer.n_gpus_per_node=${gpus}
    trainer.nnodes=1
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)
python3 -m verl.trainer.main_ppo "${data[@]}" "${policy[@]}" "${sampler[@]}" "${trainer[@]}" "$@"
