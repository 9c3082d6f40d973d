//! Templates of four families, rendered as Hugging Face renders them. See `templates/README.md`.

use ls_chat::{ChatTemplate, Message};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_721_997_296)
}

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates").join(name);
    std::fs::read_to_string(path).unwrap()
}

fn messages(case: &Value) -> Vec<Message> {
    let turn = |turn: &Value| Message::new(turn[0].as_str().unwrap(), turn[1].as_str().unwrap());
    case["messages"].as_array().unwrap().iter().map(turn).collect()
}

#[test]
fn every_conversation_has_the_text_that_transformers_gives_it() {
    let golden: Vec<Value> = serde_json::from_str(&read("golden.json")).unwrap();
    assert_eq!(golden.len(), 5 * 7 * 2);
    let mut refused = 0;
    for case in &golden {
        let text = |key: &str| case[key].as_str().unwrap();
        let source = read(&format!("{}.jinja", text("template")));
        let template = ChatTemplate::new(&source, text("bos"), text("eos")).unwrap();
        let answer = case["answer"].as_bool().unwrap();
        match (template.render_with(&messages(case), now(), answer), case["refused"].as_str()) {
            (Ok(rendered), None) => assert_eq!(rendered, text("text"), "{case}"),
            (Err(error), Some(reason)) => {
                assert!(
                    error.is_refusal() && error.to_string().contains(reason),
                    "{error}: {case}"
                );
                refused += 1;
            }
            (found, _) => panic!("{found:?}: {case}"),
        }
    }
    assert!(refused > 0 && refused < golden.len(), "both outcomes are tested");
}

#[test]
fn a_template_that_does_not_end_or_parse_is_an_error() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    let error = ChatTemplate::new(endless, "", "").unwrap().render(&[], now()).unwrap_err();
    assert!(!error.is_refusal(), "{error}");
    assert!(ChatTemplate::new("{% if %}", "", "").is_err());
    let unknown = ChatTemplate::new("{{ messages | no_such_filter }}", "", "").unwrap();
    assert!(!unknown.render(&[], now()).unwrap_err().is_refusal());
}
