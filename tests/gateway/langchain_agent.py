"""An agent of LangChain, unmodified, in an environment of its own: `langchain_agent.py BASE_URL TOKEN` uses a tool twice, once streamed."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(base_url=sys.argv[1], api_key=sys.argv[2], model="policy", max_retries=0).bind_tools([add])
messages = [HumanMessage("What is 1 + 2?")]
for turn in range(3):
    if turn == 1:
        said = None
        for chunk in model.stream(messages):
            said = chunk if said is None else said + chunk
    else:
        said = model.invoke(messages)
    messages.append(said)
    messages += [ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]) for call in said.tool_calls]
print(messages[-1].content)
