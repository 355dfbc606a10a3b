"""An agent that guesses a number with the model that is being trained: it plays, and posts its reward. Needs `pip install openai httpx`."""

import concurrent.futures
import os

import httpx
import openai

GATEWAY, TOKEN = os.environ["PIPELINERL_GATEWAY"], os.environ["PIPELINERL_GATEWAY_TOKEN"]


def play(model: openai.OpenAI, number: int) -> float:
    messages = [{"role": "user", "content": "guess="}]
    for turn in range(4):
        said = model.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        if not said or said not in "0123456789":
            return 0.0
        if int(said) == number:
            return 1.0 - 0.1 * turn
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "h" if int(said) < number else "l"}]
    return 0.0


def work() -> None:
    with httpx.Client(timeout=90) as http:
        while (lent := http.post(f"{GATEWAY}/episodes/next", headers={"authorization": f"Bearer {TOKEN}"})).is_success:
            if lent.status_code == 204:  # nothing to play for now
                continue
            episode = lent.json()
            with openai.OpenAI(base_url=episode["base_url"], api_key=episode["token"]) as model:
                reward = play(model, episode["prompt"]["columns"]["number"])
            headers = {"authorization": f"Bearer {episode['token']}"}
            http.post(f"{episode['episode_url']}/finish", json={"reward": reward}, headers=headers)


with concurrent.futures.ThreadPoolExecutor(16) as pool:
    for worker in [pool.submit(work) for _ in range(16)]:
        try:
            worker.result()
        except (httpx.TransportError, openai.APIError) as error:
            print(f"the run has ended: {error}")
