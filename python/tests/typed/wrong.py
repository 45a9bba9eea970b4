"""What a type checker must refuse, line by line."""

import phsa

llm = phsa.LLM("m")
llm.generate("x", temp=0)
llm.generate(5)
llm.chat("x", logit_bias=5)
llm.generate("x", n="2")
