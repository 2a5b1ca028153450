"""Kernels in every precision, compiled. On a CPU, where they are interpreted, tests/unit tries them in one."""

import pytest
import torch

from tests.unit.core.kernels.test_bounds import test_masked_tokens_may_hold_anything
from tests.unit.core.kernels.test_clipped import (
    test_coarse_log_probs_are_worked_on_in_float32_and_get_gradients_of_their_dtype,
    test_masked_tokens_may_hold_anything_and_get_no_gradient,
)
from tests.unit.core.kernels.test_logprobs import (
    test_any_tiling_gives_the_same,
    test_equal_to_the_naive_computation_forbidden_tokens_included,
    test_float32_logits_are_not_rounded_to_the_dtype_of_the_model,
)
from tests.unit.core.test_loss_kernels import kernels, test_objectives_with_one_pair_of_bounds
from tests.unit.rollout.cuda.kernels.test_kernels import (
    test_add_norm_is_transformers_residual_and_norm,
    test_decoding_attends_to_the_pages_of_the_slot_up_to_the_row_itself,
    test_gate_is_silu_times_up,
    test_prefill_attends_causally_within_the_pages_of_each_sequence,
    test_rotation_is_transformers_and_the_cache_is_written_in_place,
    test_sampling_is_the_general_engines_draw,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

__all__ = [
    "kernels",
    "test_add_norm_is_transformers_residual_and_norm",
    "test_any_tiling_gives_the_same",
    "test_coarse_log_probs_are_worked_on_in_float32_and_get_gradients_of_their_dtype",
    "test_decoding_attends_to_the_pages_of_the_slot_up_to_the_row_itself",
    "test_equal_to_the_naive_computation_forbidden_tokens_included",
    "test_float32_logits_are_not_rounded_to_the_dtype_of_the_model",
    "test_gate_is_silu_times_up",
    "test_masked_tokens_may_hold_anything",
    "test_masked_tokens_may_hold_anything_and_get_no_gradient",
    "test_objectives_with_one_pair_of_bounds",
    "test_prefill_attends_causally_within_the_pages_of_each_sequence",
    "test_rotation_is_transformers_and_the_cache_is_written_in_place",
    "test_sampling_is_the_general_engines_draw",
]
