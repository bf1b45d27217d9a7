"""`tandem generate`: streams one completion to stdout, or prints it whole as JSON."""

from __future__ import annotations

import json
import sys

from cluster.access import Access
from cluster.client import Client
from cluster.status_view import as_data
from tandem.errors import TandemError
from tandem.rpc.tandem.v1.common_pb2 import FinishReason, SamplingParams
from tandem.rpc.tandem.v1.inference_pb2 import GenerateResponse


async def run_generate(
    access: Access | str, prompt: str, sampling: SamplingParams, *, as_json: bool, with_messages: bool = False
) -> None:
    """Raises TandemError; when cancelled, so is the request."""
    responses: list[GenerateResponse] = []
    async with Client(access) as client:
        stream = client.generate(prompt, sampling)
        try:
            async for response in stream:
                responses.append(response)
                if not as_json:
                    sys.stdout.write(response.text)
                    sys.stdout.flush()
        except TandemError:
            if responses and not as_json:
                print(flush=True)  # what is told of the error begins a line of its own
            raise
        finally:
            await stream.aclose()
    result = result_data(responses, with_messages=with_messages)
    print(json.dumps(result, indent=2) if as_json else "")


def result_data(responses: list[GenerateResponse], *, with_messages: bool) -> dict[str, object]:
    """All steps of one request as one object; the last step carries usage and timings.

    The timings of each message of the KV transfer are there on demand only: they can be thousands.
    """
    last = responses[-1]
    timings = as_data(last.timings)
    if not with_messages and "transfer" in timings.get("prefill", {}):
        del timings["prefill"]["transfer"]["messages"]
    reason = FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
    return {
        "request_id": last.request_id,
        "text": "".join(response.text for response in responses),
        "token_ids": [token for response in responses for token in response.token_ids],
        "finish_reason": reason,
        "usage": as_data(last.usage),
        "timings": timings,
    }
