//! Scores of an answer's text, as the public scorers of the datasets define them; pure functions, shares between 0
//! and 1.
//!
//! - Token F1 and exact match after SQuAD's normalisation (Rajpurkar et al., 2016): lower case, no ASCII punctuation, no
//!   articles, tokens cut at whitespace. Of several references the best counts; with CoQA's (Reddy et al., 2019) each is
//!   left out once, as the people who answered were themselves judged by the others' answers. With Qasper (Dasigi et al.,
//!   2021) answers that share no token score 0 even if both are empty; elsewhere two empty ones agree.
//! - BLEU of a sentence ([`bleu`]), and what likelihoods say of a choice between answers ([`choice`]).
//!
//! `tools/score.py` computes the same apart from this code.

pub(crate) mod bleu;
pub(crate) mod choice;

use bleu::Bleu;
use regex::Regex;
use std::collections::HashMap;

/// What scoring needs compiled once.
#[derive(Debug)]
pub(crate) struct Scorer {
    articles: Regex,
    bleu: Bleu,
}

/// How answers are held against several references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// The best of all.
    Best,
    /// The best of all; answers without a common token score nothing.
    Qasper,
    /// Leaving out each in turn, on average.
    LeaveOneOut,
}

impl Scorer {
    pub(crate) fn new() -> Scorer {
        let articles = Regex::new(r"\b(?:a|an|the)\b").expect("the pattern is valid");
        Scorer { articles, bleu: Bleu::new() }
    }

    /// The tokens of a text that count.
    fn tokens(&self, text: &str) -> Vec<String> {
        let lower = text.to_lowercase();
        let bare: String = lower.chars().filter(|c| !c.is_ascii_punctuation()).collect();
        words(&self.articles.replace_all(&bare, " ")).map(str::to_owned).collect()
    }

    /// Token F1 of an answer.
    pub(crate) fn f1(&self, answer: &str, references: &[String], rule: Rule) -> f64 {
        let answer = self.tokens(answer);
        self.over(references, rule, |reference| f1(&answer, reference, rule != Rule::Qasper))
    }

    /// Whether an answer is a reference, but for what normalisation takes away.
    pub(crate) fn exact(&self, answer: &str, references: &[String], rule: Rule) -> f64 {
        let answer = self.tokens(answer);
        self.over(references, rule, |reference| f64::from(u8::from(answer == reference)))
    }

    /// BLEU of an answer against the reference that it fits best.
    pub(crate) fn bleu(&self, answer: &str, references: &[String]) -> f64 {
        references.iter().map(|reference| self.bleu.of(answer, reference)).fold(0.0, f64::max)
    }

    fn over(&self, references: &[String], rule: Rule, score: impl Fn(&[String]) -> f64) -> f64 {
        let scores: Vec<f64> = references.iter().map(|text| score(&self.tokens(text))).collect();
        let best_without = |left_out: usize| {
            let others = scores.iter().enumerate().filter(|(index, _)| *index != left_out);
            others.map(|(_, score)| *score).fold(0.0, f64::max)
        };
        match rule {
            Rule::LeaveOneOut if scores.len() > 1 => {
                (0..scores.len()).map(best_without).sum::<f64>() / scores.len() as f64
            }
            _ => best_without(usize::MAX),
        }
    }
}

/// The harmonic mean of precision and recall over tokens, each counted as often as it is there.
fn f1(answer: &[String], reference: &[String], empty_agrees: bool) -> f64 {
    if answer.is_empty() || reference.is_empty() {
        return f64::from(u8::from(empty_agrees && answer == reference));
    }
    let mut left: HashMap<&str, usize> = HashMap::new();
    reference.iter().for_each(|token| *left.entry(token).or_default() += 1);
    let mut common = 0usize;
    for token in answer {
        if let Some(count) = left.get_mut(token.as_str()).filter(|count| **count > 0) {
            *count -= 1;
            common += 1;
        }
    }
    if common == 0 {
        return 0.0;
    }
    let precision = common as f64 / answer.len() as f64;
    let recall = common as f64 / reference.len() as f64;
    2.0 * precision * recall / (precision + recall)
}

/// Pieces between whitespace, as Python's `split` sees it: four control characters count.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let is_space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
    text.split(is_space).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn what_does_not_count_is_taken_away_in_the_scorers_order() {
        let tokens = |text| Scorer::new().tokens(text).join("|");
        assert_eq!(tokens("The  Lighthouse-keeper's cat, a TABBY!"), "lighthousekeepers|cat|tabby");
        assert_eq!(
            tokens("a.n. other an theory"),
            "other|theory",
            "punctuation goes before articles"
        );
        assert_eq!(
            tokens("b—a—b Été\u{1f}x"),
            "b—|—b|été|x",
            "a dash that is not ASCII ends a word"
        );
        assert_eq!(tokens("the a an ."), "");
    }

    #[test]
    fn f1_counts_each_token_as_often_as_it_is_there() {
        let scorer = Scorer::new();
        let f1 = |answer, references: &[&str], rule| scorer.f1(answer, &list(references), rule);
        assert_eq!(f1("the red boat", &["a red boat"], Rule::Best), 1.0);
        // One of two, one of three.
        assert!((f1("red red", &["red old boat"], Rule::Best) - 0.4).abs() < 1e-12);
        assert_eq!(f1("blue", &["red", "blue"], Rule::Best), 1.0);
        assert_eq!(f1("blue", &["red"], Rule::Best), 0.0);
        assert_eq!(f1("the", &["a"], Rule::Best), 1.0, "two empty answers agree");
        assert_eq!(f1("the", &["a"], Rule::Qasper), 0.0, "but not with Qasper");
        assert_eq!(f1("the", &["red"], Rule::Best), 0.0);
    }

    #[test]
    fn the_reference_that_fits_best_counts() {
        let scorer = Scorer::new();
        let references = list(&["w x y z", "a b c d", "a b"]);
        assert_eq!(scorer.bleu("a b c d", &references), 1.0);
        assert_eq!(scorer.exact("The red, boat", &list(&["boat", "red boat"]), Rule::Best), 1.0);
        assert_eq!(scorer.exact("red boats", &list(&["boat", "red boat"]), Rule::Best), 0.0);
    }

    #[test]
    fn each_reference_is_left_out_once() {
        let scorer = Scorer::new();
        let references = list(&["red", "red boat", "sea"]);
        let f1 = |rule| scorer.f1("red", &references, rule);
        assert_eq!(f1(Rule::Best), 1.0);
        // Without the first the second gives 2/3.
        assert!((f1(Rule::LeaveOneOut) - (2.0 / 3.0 + 1.0 + 1.0) / 3.0).abs() < 1e-12);
        assert!((scorer.exact("Red.", &references, Rule::LeaveOneOut) - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(scorer.f1("red", &references[..1], Rule::LeaveOneOut), 1.0, "one stands alone");
    }
}
