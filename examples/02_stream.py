"""Stream three answers at the same time with AsyncLLM; prints each piece with the number of its prompt."""

from __future__ import annotations

import asyncio

from halocline import AsyncLLM, SamplingParams


async def main() -> None:
    async with AsyncLLM("gemma3-270m", kv_bytes="32MiB") as llm:

        async def follow(number: int, prompt: str) -> None:
            seen = 0
            async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12)):
                print(f"[{number}] {output.outputs[0].text[seen:]!r}")
                seen = len(output.outputs[0].text)

        await asyncio.gather(*(follow(number, f"{number} times seven is") for number in (2, 3, 4)))


if __name__ == "__main__":
    asyncio.run(main())
