//! Writes the corpus: small good inputs, made by the project's own writers and the fixtures of its tests.
//! `cargo run -p ls-fuzz --example corpus`; what changes is to be reviewed as a change of formats.

#[expect(dead_code, reason = "only bundles are written here")]
#[path = "../../../runtime/engine/tests/sample/mod.rs"]
mod sample;

#[expect(dead_code, reason = "only some of the writers are needed")]
#[path = "../../prep/tests/import/fixture/mod.rs"]
mod fixture;

#[expect(dead_code, reason = "only stacks are made here")]
#[path = "../../../runtime/hash/tests/hash/plain.rs"]
mod plain;

use fixture::gguf::{F16, GgufFile, Meta, RawTensor};
use fixture::vocabulary::{byte_level, sentencepiece};
use fixture::{TinyModel, folder};
use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::model::{Architecture, ModelConfig, RopeScaling};
use ls_bundle::tables::TableKind;
use ls_cache::policy::GapTable;
use ls_cache::{AccessTrace, Blocks, ReuseTable};
use ls_control::profile::{DeviceProfile, DiskPoint, KernelPoint, Visit};
use ls_control::{CoordinationPlan, Lut, Quantizer};
use ls_hash::{PlaneBits, Scaling};
use ls_paper::{Entry, Ledger};
use ls_prep::chain::Chain;
use ls_prep::recipe::Recipe;
use ls_prep::stages::activations::Activations;
use ls_prep::stages::embedding::Embedding;
use ls_prep::stages::placement::Placement;
use ls_prep::synth::{SynthOptions, synth};
use plain::{HeadKind, Plain, Shape};
use std::path::{Path, PathBuf};

fn main() {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    bundles(scratch.path());
    tables();
    gguf();
    safetensors(scratch.path());
    control();
    artifacts(scratch.path());
    texts();
    evaluations();
    datasets();
    ledger(scratch.path());
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn put(target: &str, name: &str, bytes: impl AsRef<[u8]>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join(name), bytes).expect("a file");
}

fn small_model() -> ModelConfig {
    ModelConfig {
        vocab_size: 24,
        hidden: 64,
        ffn_hidden: 20,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        ..sample::config(false)
    }
}

fn bundles(scratch: &Path) {
    for version in ["v1", "v2"] {
        let golden = root().join(format!("artifacts/golden/tiny-{version}.lsb"));
        put("bundle", version, std::fs::read(golden).expect("a golden file"));
    }
    let path = scratch.join("all.lsb");
    let bundle = sample::write_based_bundle(&path, small_model(), 2);
    let bytes = std::fs::read(&path).expect("it was written");
    put("bundle", "tables", &bytes);
    put("engine", "untied", &bytes);
    let tied = ModelConfig { tied_head: true, layers: 1, ..small_model() };
    sample::write_based_bundle(&path, tied, 1);
    put("engine", "tied", std::fs::read(&path).expect("it was written"));
    for (target, kind) in [
        ("stack", TableKind::Predictor),
        ("mlp", TableKind::Mlp),
        ("reuse", TableKind::Reuse),
        ("base", TableKind::BaseScores),
    ] {
        let table = bundle.read_table(LayerId(0), kind).expect("it is sound").expect("it is there");
        // Tables of the base do not say whose they are.
        let front = [bundle.model().ffn_hidden as u8, bundle.model().hidden as u8];
        let front = if target == "base" { &front[..] } else { &[] };
        put(target, "bundle", [front, &table].concat());
    }
}

fn tables() {
    let shape = |head, planes| Shape {
        dims: 10,
        stacks: 1,
        tau: 4,
        width: 24,
        layers: 3,
        last_table: false,
        planes,
        scaling: Scaling::Fixed,
        head,
        seed: 1,
    };
    let deep =
        Shape { last_table: true, stacks: 2, ..shape(HeadKind::Signs, Some(PlaneBits::Four)) };
    let levels = Shape { layers: 1, ..shape(HeadKind::Levels, Some(PlaneBits::Two)) };
    for (name, shape) in [
        ("class", shape(HeadKind::Class, None)),
        ("value", shape(HeadKind::Value, None)),
        ("deep", deep),
        ("levels", levels),
    ] {
        put("stack", name, Plain::random(&shape).pack().to_bytes().expect("valid tables"));
    }
    let distances = (0..16).map(|history| 16 + history).collect();
    let gaps = GapTable { thresholds: vec![2, 3, 6], history: 2, distances };
    put("reuse", "gaps", ReuseTable::Gaps(gaps).to_bytes());
    let blocks = Blocks::new(vec![3..40, 50..130]);
    let mut trace = AccessTrace::with_capacity(blocks, 3);
    for token in 0..3 {
        trace.push([3, 9 + token, 39].map(BlockId));
        trace.push([50 + token, 129].map(BlockId));
    }
    put("trace", "small", trace.to_bytes());
}

/// A header and the number of zeros that stand for the data behind it.
fn with_zeros(header: &[u8], data_bytes: usize) -> Vec<u8> {
    let zeros = u32::try_from(data_bytes).expect("a small model");
    [header, &zeros.to_le_bytes()].concat()
}

fn tiny(architecture: Architecture, tied: bool) -> TinyModel {
    let mut model = TinyModel::new(architecture, tied);
    model.config =
        ModelConfig { vocab_size: 12, hidden: 32, ffn_hidden: 32, layers: 2, ..model.config };
    model.config.head_dim = 16;
    model.tensors = ls_prep::model::roles::Role::all(&model.config)
        .into_iter()
        .map(|(role, shape)| {
            let values = vec![0.0; shape.iter().product::<u32>() as usize];
            fixture::TinyTensor { role, shape, values }
        })
        .collect();
    model
}

fn gguf() {
    let few = || {
        let mut tokens = byte_level("smollm");
        tokens.tokens.truncate(12);
        tokens.kinds.truncate(12);
        tokens.merges.clear();
        tokens
    };
    for (name, architecture, tied) in
        [("llama", Architecture::Llama, true), ("qwen3", Architecture::Qwen3, false)]
    {
        let written = GgufFile::of(&tiny(architecture, tied), &few(), F16).write();
        put(
            "gguf",
            name,
            with_zeros(&written.bytes[..written.data], written.bytes.len() - written.data),
        );
    }
    let mut odd = GgufFile::of(&tiny(Architecture::Qwen2, false), &few(), 2);
    odd.set("general.alignment", Some(Meta::U32(64)));
    odd.tensors.push(RawTensor {
        name: "rope_freqs.weight".into(),
        dims: vec![8],
        type_id: 0,
        bytes: vec![0; 32],
    });
    let written = odd.write();
    put(
        "gguf",
        "quantised",
        with_zeros(&written.bytes[..written.data], written.bytes.len() - written.data),
    );
    for tokens in [byte_level("llama-bpe"), sentencepiece()] {
        let mut file = GgufFile { metadata: tokens.gguf_metadata(), tensors: Vec::new() };
        file.set("tokenizer.chat_template", Some(Meta::Text("{{ messages }}".into())));
        put("gguf-tokenizer", tokens.model, with_zeros(&file.write().bytes, 0));
    }
}

fn safetensors(scratch: &Path) {
    let at = scratch.join("folder");
    std::fs::create_dir_all(&at).expect("a folder");
    let read = |name: &str| std::fs::read(at.join(name)).expect("it was written");
    for (name, architecture) in [("qwen2", Architecture::Qwen2), ("llama", Architecture::Llama)] {
        let mut model = tiny(architecture, false);
        folder::write(&at, &model, &byte_level("smollm"), 1);
        let file = read("model.safetensors");
        let header = 8 + u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
        put("safetensors", name, with_zeros(&file[..header], file.len() - header));
        model.config.rope.scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        };
        put("config", name, folder::config_json(&model.config).to_string());
    }
    for target in ["tokenizer", "prompt"] {
        put(target, "byte-level", read("tokenizer.json"));
    }
    folder::write(&at, &tiny(Architecture::Qwen2, false), &byte_level("smollm"), 2);
    put("index", "two", read("model.safetensors.index.json"));
}

fn control() {
    let target = ls_control::Target {
        device: "Board".into(),
        settings: "leanstream+base 20%".into(),
        bundle: 7,
    };
    let loads: Vec<u64> = (0..100).map(|load| load * 10).collect();
    let plans = std::array::from_fn(|state| CoordinationPlan::uniform(1 << (state % 4), 2));
    let layers = (0..2).map(|_| (Quantizer::of_samples(&loads), plans));
    put(
        "lut",
        "two",
        Lut::new(target.clone(), 4, CoordinationPlan::uniform(2, 1), layers).to_bytes(),
    );
    let visit = |layer| Visit {
        layer: LayerId(layer),
        plan: CoordinationPlan::uniform(2, 8),
        remaining_bytes: 500,
        first_us: 1.5,
        second_us: 2.5,
        left_bytes: 300,
        next_remaining_bytes: 700,
    };
    let profile = DeviceProfile {
        target,
        disk_latency_us: 80.0,
        disk: vec![DiskPoint { request_bytes: 4096, depth: 1, bytes_per_s: 4e7 }],
        memory_bytes_per_s: 2e10,
        kernels: vec![KernelPoint { blocks: 100, segments: 4, time_us: 33.0 }],
        compute_point_us: 1.0,
        io_point_us: 5.0,
        work_bytes: vec![1000, 900],
        visits: vec![visit(0), visit(1)],
    };
    put("profile", "two", profile.to_bytes());
}

/// Longest artifact that becomes part of the corpus.
const MAX_ARTIFACT_BYTES: u64 = 24 << 10;

fn artifacts(scratch: &Path) {
    let model = scratch.join("synth");
    let options = SynthOptions { layers: 1, hidden: 64, neurons: 16, ..SynthOptions::default() };
    synth(&model, &options).expect("a synthetic model");
    let mut recipe = Recipe::load("tiny").expect("the recipe is built in");
    recipe.calibration.tokens = 256;
    let text = root().join("datasets/tiny/lighthouse.txt");
    let artifacts = scratch.join("artifacts");
    let chain =
        Chain::open(&model, &artifacts, recipe, vec![text], &mut ()).expect("a model and a text");
    let store = &chain.source.store;
    let (windows, prompts) = chain.windows(&mut ()).expect("a text");
    let made =
        store.run(&chain.activations(&windows, prompts), None, &mut ()).expect("activations");
    let activations = Activations::new(made.0).expect("activations");
    let made = store.run(&chain.embedding(&activations), None, &mut ()).expect("an embedding");
    let embedding = Embedding::new(made.0).expect("an embedding");
    let made =
        store.run(&chain.placement(&activations, &embedding), None, &mut ()).expect("a placement");
    let placement = Placement::read(&made.0).expect("a placement");
    store
        .run(&chain.predictor(&activations, Some(&placement), false), None, &mut ())
        .expect("predictors");
    store.run(&chain.reuse(&activations, &placement), None, &mut ()).expect("tables of reuse");
    store
        .run(&chain.base(&activations).expect("it can have a base"), None, &mut ())
        .expect("a base");
    store.run(&chain.mlp(&activations, Some(&placement)), None, &mut ()).expect("baselines");
    for stage in std::fs::read_dir(store.folder()).expect("a folder of stages") {
        let stage = stage.expect("an entry").path();
        for file in std::fs::read_dir(&stage).into_iter().flatten() {
            let file = file.expect("an entry").path();
            let bytes = std::fs::read(&file).expect("an artifact");
            if bytes.len() as u64 <= MAX_ARTIFACT_BYTES {
                put("artifact", &stage.file_name().unwrap_or_default().to_string_lossy(), bytes);
            } else {
                eprintln!("{}: {} bytes are too long", file.display(), bytes.len());
            }
        }
    }
}

fn texts() {
    for name in ["lines", "llama3", "mistral", "qwen2.5", "smollm2"] {
        let path = root().join(format!("runtime/chat/tests/templates/{name}.jinja"));
        put("template", name, std::fs::read(path).expect("a template"));
    }
    for path in ["prep/recipes/tiny", "prep/recipes/widened", "paper/paper"] {
        let file = root().join(format!("tools/{path}.toml"));
        let name = path.rsplit('/').next().unwrap_or_default();
        put("recipe", name, std::fs::read(file).expect("a recipe"));
    }
    put(
        "http-chat",
        "plain",
        r#"{"model": "model", "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content":
            [{"type": "text", "text": "What is a tide?"}]}], "max_tokens": 64, "temperature": 0.7, "stream": true,
            "stream_options": {"include_usage": true}, "stop": ["\n", "\u00e9"], "seed": -4, "n": 1}"#,
    );
    put(
        "http-completion",
        "text",
        r#"{"prompt": "Once upon a time", "max_tokens": 16, "top_p": 0.9, "top_k": 40}"#,
    );
    put(
        "http-completion",
        "tokens",
        r#"{"prompt": [1, 2, 300], "stop": "x", "logprobs": null, "repeat_penalty": 1.1}"#,
    );
}

fn evaluations() {
    put(
        "truthfulqa",
        "rows",
        "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\nA,B,\"Why, \"\"so\"\"?\",Because,\
         \"Because; It rains. ;\",\"No;\nNever\",x\nA,B,Do bats see?,Yes,Yes; Caf\u{e9}s,No,y\n",
    );
    put(
        "truthfulqa",
        "newer",
        "Best Incorrect Answer,Question,Best Answer,Correct Answers,Incorrect Answers\r\nNo,Why?,So,So,No\r\n",
    );
    put(
        "qasper",
        "papers",
        "{\"input\": \"A paper.\", \"instructions\": [\"What?\", \"Who?\"], \"outputs\": [\"This\", [\"I\", \"me\"]], \
         \"evaluation\": \"f1\"}\n\n{\"input\": \"Why?\", \"context\": \"A paper.\", \"answers\": [\"So\"], \"length\": 3}\n",
    );
    put(
        "questions",
        "lines",
        "{\"question\": \"Who?\", \"answers\": [\"Me\", \"I\"], \"incorrect\": [\"You\"], \"context\": \"Caf\u{e9}\"}\n\
         {\"question\": \"Why?\", \"answers\": [\"So\"]}\n",
    );
    put(
        "coqa",
        "stories",
        r#"{"version": "1.0", "data": [{"id": "x", "story": "A red boat.",
  "questions": [{"input_text": "What?", "turn_id": 1}, {"input_text": "Its colour?", "turn_id": 2}],
  "answers": [{"input_text": "a boat", "turn_id": 1, "span_text": "boat"}, {"input_text": "red", "turn_id": 2}],
  "additional_answers": {"0": [{"input_text": "boat", "turn_id": 1}, {"input_text": "Red", "turn_id": 2}]}},
 {"story": "Snow.", "questions": [{"input_text": "What?", "turn_id": 1}], "answers": [{"input_text": "snow", "turn_id": 1}]}]}"#,
    );
    put(
        "results",
        "run",
        "{\"leanstream_eval\":1,\"run\":{\"task\":\"qa\"}}\n\
         {\"item\":0,\"place\":\"line 1\",\"question\":\"Who?\",\"scores\":{\"f1\":0.5,\"mc1\":1},\"sums\":{\"seconds\":1.5}}\n\
         {\"item\":2,\"scores\":{\"f1\":1.0},\"sums\":{\"seconds\":2}}\n{\"item\":3,\"sco",
    );
}

fn datasets() {
    for name in ["coqa", "debian-handbook", "wikitext2-test"] {
        let path = root().join(format!("datasets/manifests/{name}.toml"));
        let text = std::fs::read_to_string(path).expect("a manifest");
        // The target's file is called so.
        let text = text.replacen(&format!("name = \"{name}\""), "name = \"tiny\"", 1);
        put("manifest", name, text);
    }
    let paragraph =
        "who keeps a lamp lit keeps more than a lamp, as the old people of the coast say";
    put(
        "package",
        "page",
        format!(
            "\0<html><head><title>No</title></head><body><!-- no --><p>One,\n {paragraph}&nbsp;&amp; <b>so on</b>&hellip;</p>\
             <div>{paragraph}<pre>code</pre></div>&#233;&#x2019; {paragraph}"
        ),
    );
    let mut object = b"X\n\0\0\0\x03\0\0\0\x10\0\0\0\x02".to_vec();
    for string in ["EMMA", "a line of text"] {
        object.extend(0x0004_0009u32.to_be_bytes());
        object.extend((string.len() as u32).to_be_bytes());
        object.extend(string.bytes());
    }
    // zlib's form of bytes that are stored as they are.
    let length = object.len() as u16;
    let (mut a, mut b) = (1u32, 0u32);
    for &byte in &object {
        a = (a + u32::from(byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    let stored =
        [&[0x78, 0x01, 0x01][..], &length.to_le_bytes(), &(!length).to_le_bytes()].concat();
    let front = [&[1][..], &u32::from(length).to_be_bytes(), &stored].concat();
    put("package", "data", [&front[..], &object, &((b << 16) | a).to_be_bytes()].concat());
}

/// Entries as programs give them that are measured.
fn ledger(scratch: &Path) {
    let path = scratch.join("results.jsonl");
    let mut ledger = Ledger::open(&path).expect("a ledger");
    let bench = serde_json::json!({
        "rep": 0, "decode_tok_s": 12.5, "decode_tokens": 48, "bound_fraction": 0.5, "bytes_read_per_token": 2e6,
        "stalled_s": 0.5, "predicting_s": 0.1, "predictions": 900, "ttft_s": 0.3, "demand_hits": 10, "prefetch_hits": 5,
        "misses": 3, "demand_hits_by_layer": [5, 5], "prefetch_hits_by_layer": [2, 3], "misses_by_layer": [1, 2],
        "perplexity": 23.5, "f1": 0.2, "mc1": 0.3, "mc2": 0.4, "avg_ts": 7.5, "controller": "lut",
        "device": {"energy_per_token_j": 0.5, "mean_power_w": 5.0, "temperature_max_c": 60.0},
    });
    let report = serde_json::json!({
        "predictors": [{"name": "our stack", "block": 2, "imp20": 0.9, "top10": 0.8, "red95": 0.1, "bytes_per_layer": 1e5,
            "microseconds": 90.0}],
        "guard": [{"dense_perplexity": 23.0, "choices": [{"tolerance": 0.05, "share": 0.1, "base_share": 0.2,
            "perplexity": 24.0}]}],
        "refinement": [null, {"priority": [{"imp20": 0.7}, {"imp20": 0.9}], "file": [{"imp20": 0.6}]}],
    });
    for (rep, output) in [bench, report].into_iter().enumerate() {
        let entry = Entry {
            key: format!("{rep:032x}"),
            command: "ls-run bench model.lsb".into(),
            limit_bytes: (rep == 0).then_some(1 << 27),
            rep: rep as u32,
            exit: Some(0),
            seconds: 1.5,
            output: vec![output],
            error: None,
        };
        ledger.add(entry).expect("room for an entry");
    }
    put("ledger", "two", std::fs::read(&path).expect("it was written"));
}
