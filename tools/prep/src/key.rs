//! [`Key`]: the name of what a stage makes, derived from all that it depends on; and each stage's own seed.
//!
//! Two runs that would give the same bytes have the same key, and two that might not have different ones: the key is a
//! BLAKE3 hash of the stage's name and schema number, its parameters in one canonical form, and the keys of its inputs.

use crate::error::{PrepError, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt::{self, Display};

/// A BLAKE3 hash that names an artifact. Written as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Key([u8; 32]);

impl Key {
    /// The key of what stage `name` makes of `params` and `inputs`, in the order that the stage lists them.
    #[must_use]
    pub fn derive(name: &str, schema: u32, params: &Value, inputs: &[Key]) -> Key {
        let mut text = format!("leanstream artifact\n{name}\n{schema}\n{}\n", canonical(params));
        for input in inputs {
            text += &format!("{input}\n");
        }
        Key::of(text.as_bytes())
    }

    /// The key of some content by itself.
    #[must_use]
    pub fn of(content: &[u8]) -> Key {
        Key(*blake3::hash(content).as_bytes())
    }

    /// Reads 64 hexadecimal digits.
    pub fn parse(hex: &str) -> Result<Key> {
        match blake3::Hash::from_hex(hex) {
            Ok(hash) => Ok(Key(*hash.as_bytes())),
            Err(problem) => Err(PrepError::corrupt(format!("key {hex:?}"), problem)),
        }
    }

    /// The first 12 digits: enough for people.
    #[must_use]
    pub fn short(self) -> String {
        self.to_string()[..12].to_owned()
    }
}

impl Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl From<Key> for String {
    fn from(key: Key) -> String {
        key.to_string()
    }
}

impl TryFrom<String> for Key {
    type Error = PrepError;
    fn try_from(hex: String) -> Result<Key> {
        Key::parse(&hex)
    }
}

/// The seed that stage `name` draws from under a recipe's `seed`: stages do not shift each other's numbers.
#[must_use]
pub fn stage_seed(seed: u64, name: &str) -> u64 {
    let hash = blake3::hash(format!("leanstream seed\n{seed}\n{name}\n").as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes"))
}

/// JSON without spaces whose keys are sorted, whatever order they were put in.
fn canonical(value: &Value) -> String {
    let quoted = |text: &str| Value::from(text).to_string();
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            let fields =
                fields.iter().map(|(name, v)| format!("{}:{}", quoted(name), canonical(v)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        Value::Array(items) => {
            format!("[{}]", items.iter().map(canonical).collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn everything_that_matters_changes_the_key() {
        let (a, b) = (Key::of(b"a"), Key::of(b"b"));
        let base = Key::derive("20-x", 1, &json!({"p": 1, "q": [1, 2]}), &[a, b]);
        let same = Key::derive("20-x", 1, &json!({"q": [1, 2], "p": 1}), &[a, b]);
        assert_eq!(base, same, "the order of fields does not matter");
        let others = [
            Key::derive("20-y", 1, &json!({"p": 1, "q": [1, 2]}), &[a, b]),
            Key::derive("20-x", 2, &json!({"p": 1, "q": [1, 2]}), &[a, b]),
            Key::derive("20-x", 1, &json!({"p": 1, "q": [2, 1]}), &[a, b]),
            Key::derive("20-x", 1, &json!({"p": 1.0, "q": [1, 2]}), &[a, b]),
            Key::derive("20-x", 1, &json!({"p": 1, "q": [1, 2]}), &[b, a]),
            Key::derive("20-x", 1, &json!({"p": 1, "q": [1, 2]}), &[a]),
        ];
        assert!(others.iter().all(|other| *other != base));
    }

    #[test]
    fn canonical_json_sorts_at_every_depth() {
        let value = json!({"b": {"z": null, "a": "\""}, "a": [true, {"y": 1.5, "x": 2}]});
        assert_eq!(canonical(&value), r#"{"a":[true,{"x":2,"y":1.5}],"b":{"a":"\"","z":null}}"#);
    }

    #[test]
    fn keys_read_back_what_they_write() {
        let key = Key::of(b"x");
        assert_eq!(Key::parse(&key.to_string()).unwrap(), key);
        assert!(Key::parse("abc").is_err());
    }

    #[test]
    fn stages_draw_from_seeds_of_their_own() {
        assert_ne!(stage_seed(0, "a"), stage_seed(0, "b"));
        assert_ne!(stage_seed(0, "a"), stage_seed(1, "a"));
    }
}
