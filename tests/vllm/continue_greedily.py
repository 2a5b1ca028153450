"""Run by vLLM's interpreter: `continue_greedily.py MODEL TOKENS PROMPT_ID...` prints what the model says, as JSON."""

import json
import sys

from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    model, tokens, *prompt = sys.argv[1:]
    engine = LLM(model=model, dtype="float32", max_model_len=128, enforce_eager=True)
    asked = TokensPrompt(prompt_token_ids=[int(token) for token in prompt])
    greedy = SamplingParams(
        temperature=0, max_tokens=int(tokens), logprobs=0, ignore_eos=True, skip_special_tokens=False
    )
    said = engine.generate([asked], greedy, use_tqdm=False)[0].outputs[0]
    default = engine.get_default_sampling_params()
    found = {
        "tokens": list(said.token_ids),
        "logprobs": [at[token].logprob for token, at in zip(said.token_ids, said.logprobs, strict=True)],
        "text": said.text,
        "default": {name: getattr(default, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
