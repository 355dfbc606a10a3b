"""The gateway: programs outside of a run play its rollouts over HTTP, with clients that know nothing of it.

    http            routes, tokens, errors in OpenAI's shape
    chat_completions, responses, generate
                    one module for each way in which clients speak
    turns           a conversation becomes the tokens behind a turn that was sampled; retries are told from turns that are sampled again
    episodes        what an agent has been lent
    orchestrator    messages out, answers in
    limits          what a client may send, and how slowly

The gateway holds nothing that a run needs: what was sampled is with the orchestrator, and a gateway that is killed costs the attempts that
it had lent.
"""
