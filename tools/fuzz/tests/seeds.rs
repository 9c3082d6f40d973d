//! Every target over its first inputs: its corpus, and damage made from it.

use ls_fuzz::target::{Session, TARGETS};

/// Inputs of the quick targets.
const MANY: u64 = 3000;
/// Inputs of those that take longer.
const FEW: u64 = 300;

fn holds(name: &str, inputs: u64) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of that name");
    let mut session = Session::new(*target);
    for seed in 0..inputs {
        let outcome = session.execute(&session.input(seed));
        let fault = outcome.fault();
        // How long it took is the machine's affair here.
        let fault = fault.filter(|_| outcome.panic.is_some() || outcome.peak_bytes > 64 << 20);
        assert_eq!(fault, None, "{name}, input {seed}");
    }
}

macro_rules! targets {
    ($($test:ident: $name:literal, $inputs:expr;)*) => {
        $(#[test] fn $test() { holds($name, $inputs); })*

        #[test]
        fn every_target_is_here() {
            let listed: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(listed, [$($name),*]);
        }
    };
}

targets! {
    bundle: "bundle", MANY;
    engine: "engine", FEW;
    gguf: "gguf", MANY;
    safetensors: "safetensors", MANY;
    index: "index", MANY;
    config: "config", MANY;
    gguf_tokenizer: "gguf-tokenizer", FEW;
    tokenizer: "tokenizer", FEW;
    prompt: "prompt", FEW;
    template: "template", FEW;
    artifact: "artifact", MANY;
    recipe: "recipe", FEW;
    stack: "stack", MANY;
    mlp: "mlp", MANY;
    reuse: "reuse", MANY;
    trace: "trace", MANY;
    base: "base", MANY;
    lut: "lut", MANY;
    profile: "profile", MANY;
    http_chat: "http-chat", MANY;
    http_completion: "http-completion", MANY;
    truthfulqa: "truthfulqa", MANY;
    qasper: "qasper", MANY;
    coqa: "coqa", MANY;
    questions: "questions", MANY;
    results: "results", MANY;
    manifest: "manifest", MANY;
    package: "package", MANY;
    ledger: "ledger", FEW;
}
