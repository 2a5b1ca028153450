#!/usr/bin/env bash
# GRPO -> BAPO on verl 0.9: fully-async training with partial rollout and a staleness threshold.
# Every response is used once, so weak-model is a choice for pass@k and entropy, at a cost in avg@k (docs/choose.md).
# Compared with a GRPO script, only the three policy_loss lines are new. Extra arguments override everything here:
#   bash examples/verl_bapo.sh trainer.total_epochs=1
set -euo pipefail

model=${MODEL:?path or name of a transformers model}
train_files=${TRAIN_FILES:?parquet files in verl's format}
val_files=${VAL_FILES:?parquet files in verl's format}
train_gpus=${TRAIN_GPUS:-4}
rollout_gpus=${ROLLOUT_GPUS:-4}

python -m verl.experimental.fully_async_policy.fully_async_main \
    actor_rollout_ref.actor.policy_loss._target_=bapo.adapters.verl.BapoPolicyLossConfig \
    actor_rollout_ref.actor.policy_loss.loss_mode=bapo \
    +actor_rollout_ref.actor.policy_loss.preset=weak-model \
    \
    async_training.partial_rollout=True \
    async_training.staleness_threshold=0.5 \
    async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=1 \
    algorithm.rollout_correction.bypass_mode=True \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.actor.use_rollout_log_probs=True \
    \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.model.path="$model" \
    data.train_files="$train_files" \
    data.val_files="$val_files" \
    data.train_batch_size=0 \
    data.gen_batch_size=1 \
    data.return_raw_chat=True \
    data.max_prompt_length=1024 \
    data.max_response_length=8192 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="$train_gpus" \
    rollout.nnodes=1 \
    rollout.n_gpus_per_node="$rollout_gpus" \
    rollout.total_rollout_steps=25600 \
    trainer.project_name=bapo \
    trainer.experiment_name=verl-fully-async \
    trainer.logger='["console"]' \
    "$@"
