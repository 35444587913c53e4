"""Continue two prompts from Python; prints each with what ended it."""

from __future__ import annotations

from halocline import LLM, SamplingParams


def main() -> None:
    prompts = ["The capital of France is", "Salt water sinks below fresh water because"]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=("\n",))
    with LLM("gemma3-270m", kv_bytes="32MiB") as llm:
        for output in llm.generate(prompts, params):
            completion = output.outputs[0]
            print(
                f"{output.prompt} ->{completion.text} ({completion.finish_reason}, {len(completion.token_ids)} tokens)"
            )


if __name__ == "__main__":
    main()
