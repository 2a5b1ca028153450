"""The layers of Llama, Qwen2 and Qwen3 on a GPU, forward and backward, with few launches and few passes over memory."""
