"""Prepare shards with a tokenizer of transformers, and print what they hold: `tokenize_documents.py FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import tokenizers
import transformers

from orchestrator.tokenization import shard_writer
from orchestrator.tokenization.tokenizers import load_tokenizer
from trainer.protocol.token_shards import TokensError
from trainer.worker.data import TokenStream

TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
TEMPLATE = f"{TURN}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
FORGETFUL = "{% set messages = messages[-2:] %}" + TEMPLATE
ROWS = [{"text": "größe, wörter"}, {"text": "zwei"}]


def make_tokenizer(folder: Path, template: str) -> str:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<|user|>", "<|assistant|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["what is the answer to this, and what is not?"] * 5, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", chat_template=template)
    fast.save_pretrained(folder)
    return str(folder)


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def main() -> None:
    folder = Path(sys.argv[1])
    name = make_tokenizer(folder / "tokenizer", TEMPLATE)
    tokenizer, decode = load_tokenizer(name), transformers.AutoTokenizer.from_pretrained(name).decode
    number = 0

    def hold(*sources: Path) -> dict[str, Any]:
        nonlocal number
        number += 1
        index = shard_writer.prepare(sources, folder / f"out-{number}", tokenizer=tokenizer)
        tokens = TokenStream(folder / f"out-{number}").slice(0, index.tokens).tolist()
        return {
            "all": decode([one if one >= 0 else ~one for one in tokens]),
            "trained": decode([one for one in tokens if one >= 0]), "fingerprint": index.fingerprint,
            "vocab_size": index.vocab_size, "tokenizer": index.tokenizer,
        }  # fmt: skip

    def refusal(given: str, *sources: Path) -> str:
        try:
            shard_writer.prepare(sources, folder / "never", tokenizer=load_tokenizer(given))
        except TokensError as error:
            return str(error)
        return ""

    (folder / "a.txt").write_text("what is this?")
    chat = [{"role": role, "content": content} for role, content in (("user", "what?"), ("assistant", "größe ok"))]
    chats = write_lines(folder / "chat.jsonl", [{"messages": [*chat, *chat]}, {"messages": chat}])
    prompts = write_lines(folder / "prompts.jsonl", [{"prompt": "what is", "completion": " this"}])
    table = pyarrow.table({"text": [row["text"] for row in ROWS]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    (folder / "dataset" / "train").mkdir(parents=True)
    with pyarrow.ipc.new_stream(str(folder / "dataset" / "train" / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "dataset" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "dataset" / "train" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    forgetful = make_tokenizer(folder / "forgetful", FORGETFUL)
    found = {
        "text": hold(folder / "a.txt"), "chat": hold(chats), "prompts": hold(prompts),
        "lines": hold(write_lines(folder / "rows.jsonl", ROWS)), "parquet": hold(folder / "rows.parquet"),
        "dataset": hold(folder / "dataset" / "train"), "splits": refusal(name, folder / "dataset"),
        "forgetful": refusal(forgetful, chats), "nothing": refusal(str(folder / "nothing"), chats),
        "silent": refusal(name, write_lines(folder / "silent.jsonl", [{"messages": chat[:1]}])),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
