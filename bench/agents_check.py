"""Agent frameworks against `phsa serve`, as their own documentation uses them: tools, results, structured answers.

    pip install "pydantic-ai-slim[openai,anthropic]" openai-agents
    python bench/agents_check.py http://127.0.0.1:8080 [--rounds 3]

Runs pydantic-ai over /v1/chat/completions, /v1/responses and /v1/messages, and openai-agents over the first two: an
agent with two tools, and one whose answer is an object. Prints what each did: which tools were called with which
arguments, and the answer. A small model need not be clever; but no request may be refused, every call must have
arguments of the right types, and every object must be valid.
"""

import argparse
import asyncio
import traceback
from dataclasses import dataclass, field

import agents
import pydantic
import pydantic_ai
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

QUESTION = "What is the weather in Rome, and what time is it there?"


class Place(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    country: str = pydantic.Field(max_length=20)
    capital: bool


@dataclass
class Calls:
    made: list = field(default_factory=list)

    def weather(self, city: str, days: int) -> str:
        """The weather of a city for a number of days."""
        assert isinstance(city, str) and isinstance(days, int)
        self.made.append(("weather", city, days))
        return "Sunny, 24 degrees."

    def time(self, city: str) -> str:
        """The time in a city."""
        assert isinstance(city, str)
        self.made.append(("time", city))
        return "12:30"


async def with_pydantic_ai(name, model, rounds):
    settings = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
    for number in range(rounds):
        calls = Calls()
        agent = pydantic_ai.Agent(model, tools=[calls.weather, calls.time], model_settings=settings)
        limits = UsageLimits(request_limit=4)
        try:
            answer = (await agent.run(QUESTION, usage_limits=limits)).output
        except pydantic_ai.exceptions.UsageLimitExceeded:
            answer = "(it went on calling)"
        print(f"{name}, tools, {number}: {calls.made} → {answer[:80]!r}")
    agent = pydantic_ai.Agent(model, output_type=Place, model_settings=settings)
    print(f"{name}, output by a tool: {(await agent.run('Name a city.')).output!r}")
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Place), model_settings=settings)
    try:
        print(f"{name}, native output: {(await agent.run('Name a city.')).output!r}")
    except pydantic_ai.exceptions.UserError as refused:
        # The client's own judgment, by the model's name, before anything is sent.
        print(f"{name}, native output: not asked for: {refused}")


async def with_openai_agents(name, model, rounds):
    for choice in ["auto", "required"][: max(1, rounds)]:
        calls = Calls()
        tools = [agents.function_tool(calls.weather), agents.function_tool(calls.time)]
        settings = agents.ModelSettings(temperature=0, max_tokens=200, tool_choice=choice, parallel_tool_calls=False)
        agent = agents.Agent(name="guide", instructions="Be brief.", tools=tools, model=model, model_settings=settings)
        try:
            answer = (await agents.Runner.run(agent, QUESTION, max_turns=4)).final_output
        except agents.exceptions.MaxTurnsExceeded:
            answer = "(it went on calling)"
        assert choice == "auto" or calls.made
        print(f"{name}, tools {choice}: {calls.made} → {answer[:80]!r}")
    settings = agents.ModelSettings(temperature=0, max_tokens=200)
    agent = agents.Agent(name="guide", output_type=Place, model=model, model_settings=settings)
    print(f"{name}, object: {(await agents.Runner.run(agent, 'Name a city.')).final_output!r}")


async def run(args):
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{args.server}/v1", api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client)

    messages = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=args.server, api_key="none", max_retries=0))
    model = args.model
    failed = 0
    for_pydantic = {
        "chat": OpenAIChatModel(model, provider=provider),
        "responses": OpenAIResponsesModel(model, provider=provider),
        "messages": AnthropicModel(model, provider=messages),
    }
    for_agents = {
        "chat": agents.OpenAIChatCompletionsModel(model, client),
        "responses": agents.OpenAIResponsesModel(model, client),
    }
    runs = [(f"pydantic-ai, {name}", with_pydantic_ai, one) for name, one in for_pydantic.items()]
    runs += [(f"openai-agents, {name}", with_openai_agents, one) for name, one in for_agents.items()]
    for name, check, one in runs:
        try:
            await check(name, one, args.rounds)
        except Exception:
            failed += 1
            print(f"{name} failed")
            traceback.print_exc()
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=2)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
