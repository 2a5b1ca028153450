#!/usr/bin/env bash
# A verl script that clips with bapo: a GRPO script with three lines added (the policy_loss lines).
#     pip install /path/to/bapo        # a clone of bapo, into verl's environment
#     MODEL=… TRAIN_FILES=… VAL_FILES=… bash FILE [more of verl's options]
# It needs vLLM and a GPU, and its sizes are for a model of half a billion parameters on one GPU of 80 GB.
# docs/adapters/verl.md lists the options, and has fully-async training with partial rollout.
set -euo pipefail

model=${MODEL:?is not set. Give the path or the name of a transformers model: MODEL=… bash FILE}
train_files=${TRAIN_FILES:?is not set. Give parquet files in the format of verl: TRAIN_FILES=… bash FILE}
val_files=${VAL_FILES:?is not set. Give parquet files in the format of verl: VAL_FILES=… bash FILE}
for package in bapo verl vllm; do
    python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" || {
        echo "$(command -v python) has no package $package. Activate the environment of verl, or install it there." >&2
        exit 2
    }
done

# The brake pushes negative tokens of earlier epochs down less, the further they have fallen; the first of ppo_epochs is
# GRPO's.
python -m verl.trainer.main_ppo \
    actor_rollout_ref.actor.policy_loss._target_=bapo.adapters.verl.BapoPolicyLossConfig \
    actor_rollout_ref.actor.policy_loss.loss_mode=bapo \
    +actor_rollout_ref.actor.policy_loss.objective=brake \
    \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.ppo_epochs=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$train_files" \
    data.val_files="$val_files" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=1 \
    trainer.logger='["console"]' \
    "$@"
