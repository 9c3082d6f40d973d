//! Conversations: what the KV cache keeps changes nothing but time, and the command as a person or a script meets it.

mod sample;

use clap::Parser;
use ls_engine::Engine;
use ls_engine::sampler::SamplerOptions;
use ls_run::answer::{Answer, End, Question, Speaker, Step};
use ls_run::args::RunArgs;
use ls_run::session::{Session, Workload};
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    run: RunArgs,
}

/// A speaker whose passes are shorter than the prompts below.
fn speaker(bundle: &Path) -> Speaker {
    let flags = ["test", bundle.to_str().unwrap(), "--weight-cache", "50%", "--context", "400"];
    let session = Session::open(&Flags::parse_from(flags).run).unwrap();
    let workload = Workload { prompt_tokens: 16, scored_tokens: 0 };
    let plan = session.plan(workload).unwrap();
    let (bundle, engine) = session.start(&plan, workload).unwrap();
    Speaker::new(bundle, engine, plan.pass_tokens)
}

/// What an answer was, its text and its tokens.
struct Said {
    answer: Answer,
    text: String,
    tokens: Vec<u32>,
}

fn ask(speaker: &mut Speaker, prompt: &[u32], max_tokens: u32, stop: &[&str]) -> Said {
    let stop: Vec<String> = stop.iter().map(|&stop| stop.to_owned()).collect();
    let sampler = SamplerOptions::default();
    let question = Question { tokens: prompt, sampler, max_tokens, stop: &stop, ignore_eos: false };
    let (mut text, mut tokens) = (String::new(), Vec::new());
    let mut listen = |step: Step<'_>, _: &Engine| {
        match step {
            Step::Prompt { .. } => {}
            Step::Token(token) => tokens.push(token),
            Step::Text(piece) => text.push_str(piece),
        }
        ControlFlow::Continue(())
    };
    let answer = speaker.answer(&question, &mut listen).unwrap();
    Said { answer, text, tokens }
}

fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn answers_do_not_depend_on_what_the_cache_held() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("noise.lsb");
    sample::write(&path);
    let fresh = |prompt: &[u32]| ask(&mut speaker(&path), prompt, 20, &[]).tokens;
    let flood = tokens("The river had risen in the night, and by morning the fields were flooded");
    let (longer, other) = ([&flood[..], &[33]].concat(), tokens("The rain"));
    let length = flood.len() as u32;
    let mut speaker = speaker(&path);
    let first = ask(&mut speaker, &flood, 20, &[]);
    assert_eq!((first.answer.reused_tokens, first.answer.end), (0, End::Length));
    assert_eq!((first.answer.tokens, first.tokens.len()), (20, 20));
    for (prompt, reused) in
        [(&longer, length), (&flood, length - 1), (&other, 5), (&other, 7), (&longer, 5)]
    {
        let said = ask(&mut speaker, prompt, 20, &[]);
        assert_eq!(said.tokens, fresh(prompt), "the same as without anything before it");
        assert_eq!(said.answer.reused_tokens, reused);
    }
    // A turn behind an answer finds it in the cache, but for its last token, which nothing followed.
    let said = ask(&mut speaker, &flood, 20, &[]);
    let grown = [&flood[..], &said.tokens, &other].concat();
    assert_eq!(ask(&mut speaker, &grown, 5, &[]).answer.reused_tokens, length + 19);
}

#[test]
fn a_stop_string_ends_an_answer_and_is_not_part_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("noise.lsb");
    sample::write(&path);
    let mut speaker = speaker(&path);
    let whole = ask(&mut speaker, &tokens("Once"), 60, &[]);
    let middle = whole.text.char_indices().nth(20).unwrap().0;
    let stop: String = whole.text[middle..].chars().take(2).collect();
    let cut = ask(&mut speaker, &tokens("Once"), 60, &[&stop, "never said"]);
    assert_eq!(cut.answer.end, End::Stop);
    assert_eq!(cut.text, whole.text[..whole.text.find(&stop).unwrap()]);
    assert!(cut.answer.tokens < whole.answer.tokens);
}

#[test]
fn who_breaks_off_leaves_a_speaker_that_answers_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("noise.lsb");
    sample::write(&path);
    let mut speaker = speaker(&path);
    let prompt = tokens(&"a long prompt of several passes ".repeat(8));
    let sampler = SamplerOptions::default();
    let question =
        Question { tokens: &prompt, sampler, max_tokens: 30, stop: &[], ignore_eos: false };
    let whole = ask(&mut speaker, &prompt, 30, &[]);
    let forget = tokens("something else");
    for steps in [1, 2, 5, 20, 30] {
        ask(&mut speaker, &forget, 3, &[]);
        let mut left = steps;
        let broken = speaker.answer(&question, &mut |_, _| {
            left -= 1;
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(broken.unwrap().end, End::Cancelled, "after {steps} steps");
        assert_eq!(ask(&mut speaker, &prompt, 30, &[]).tokens, whole.tokens);
    }
}

#[test]
fn a_prompt_that_cannot_be_answered_is_refused_and_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("noise.lsb");
    sample::write(&path);
    let mut speaker = speaker(&path);
    let prompt = tokens("Once upon a time");
    let before = ask(&mut speaker, &prompt, 10, &[]);
    let sampler = SamplerOptions::default();
    for (tokens, word) in [(vec![7; 401], "401"), (vec![], "empty")] {
        let question =
            Question { tokens: &tokens, sampler, max_tokens: 5, stop: &[], ignore_eos: false };
        let error = speaker.answer(&question, &mut |_, _| ControlFlow::Continue(())).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(ask(&mut speaker, &prompt, 10, &[]).tokens, before.tokens);
    // The context holds 400 tokens; the last token of an answer needs no place.
    let full = ask(&mut speaker, &[65; 395], 100, &[]);
    assert_eq!((full.answer.tokens, full.answer.end), (6, End::Length));
}

/// Starts `ls-run chat` on a bundle.
fn chat(folder: &Path, flags: &[&str]) -> Child {
    let path = folder.join("noise.lsb");
    if !path.exists() {
        sample::write(&path);
    }
    Command::new(env!("CARGO_BIN_EXE_ls-run"))
        .arg("chat")
        .arg(path)
        .args(["--memory", "128MiB"])
        .args(flags)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn finish(mut child: Child, input: &str) -> (String, String, Output) {
    // A program that ended does not read.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let out = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&out.stdout), text(&out.stderr), out)
}

#[test]
fn a_script_can_hold_a_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--temp", "0", "-n", "8", "--system-prompt", "Be brief."];
    let input = "Hello?\n/save one.json\nAnd then?\n/reset\nHello?\n/save two.json\n/save three.txt\n\
        //x \\\nand y\n/save four.json\n/stats\n/nonsense\n\n/help\n/exit\nnot read\n";
    let (stdout, stderr, out) = finish(chat(folder.path(), &flags), input);
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let json = |name: &str| serde_json::from_str::<serde_json::Value>(&read(name)).unwrap();
    assert_eq!(json("one.json"), json("two.json"), "/reset forgets all but the system prompt");
    let messages = json("one.json")["messages"].clone();
    let roles: Vec<_> = messages.as_array().unwrap().iter().map(|m| &m["role"]).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    let said = messages[2]["content"].as_str().unwrap();
    assert!(!said.is_empty() && stdout.starts_with(&format!("{said}\n")), "{stdout:?}");
    assert!(read("three.txt").contains("user: Hello?\n"));
    assert_eq!(json("four.json")["messages"][3]["content"], "/x \nand y");
    assert!(stderr.contains("tokens were in memory already") && stderr.contains("/nonsense"));
    assert!(stderr.contains("/save FILE"));
    assert!(!stderr.contains('\x1b') && !stdout.contains('\x1b'), "no colours without a terminal");
}

#[test]
fn a_conversation_outgrows_its_context_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--temp", "0", "-n", "8", "--context", "200"];
    let input = format!("{}/save all.json\n{}\n", "word after word \n".repeat(9), "x".repeat(300));
    let (stdout, stderr, out) = finish(chat(folder.path(), &flags), &input);
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    assert!(stdout.lines().count() >= 9, "{stdout:?}");
    let saved = std::fs::read_to_string(folder.path().join("all.json")).unwrap();
    let kept = saved.matches("\"user\"").count();
    assert!((1..9).contains(&kept), "the oldest exchanges went: {kept}");
    assert!(stderr.contains("the context holds 200"), "a turn that alone is too long: {stderr}");
}

#[test]
fn control_c_ends_the_answer_and_not_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = chat(folder.path(), &["--temp", "0", "--context", "2000"]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"Tell me everything.\n").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 8]).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    stdin.write_all(b"/stats\n/exit\n").unwrap();
    drop(stdin);
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    let position = stderr.split("context: ").nth(1).and_then(|s| s.split(' ').next()).unwrap();
    let position: u32 = position.parse().unwrap();
    assert!((38..1900).contains(&position), "the answer was cut at {position} of 2000 tokens");
}

#[test]
fn a_model_without_a_template_is_not_talked_to() {
    let folder = tempfile::tempdir().unwrap();
    sample::write_with(&folder.path().join("noise.lsb"), None);
    let (stdout, stderr, out) = finish(chat(folder.path(), &[]), "Hello?\n");
    assert_eq!((out.status.code(), stdout.as_str()), (Some(2), ""));
    assert!(stderr.contains("no chat template"), "{stderr}");
}
