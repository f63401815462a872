"""From a business question to the systems to buy.

from millrace.size import plan
plan(model="llama-3-8b", isl=2000, osl=200, rate=70, ttft_ms=500, hardware=["H100"]).plan.systems
"""

from millrace.size.answer import plan as plan
