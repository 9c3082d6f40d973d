//! BLEU of one sentence against one reference, as TruthfulQA's scorer takes it: sacrebleu's `corpus_bleu` of a corpus
//! of one with `tokenize="intl"`, exponential smoothing, orders 1 to 4 and no effective order.
//!
//! So an answer of fewer than four tokens scores 0, and case counts. sacrebleu's own default for sentences (its `13a`
//! tokens, effective order) gives other numbers.

use regex::Regex;
use std::collections::HashMap;

/// Longest n-gram.
const ORDERS: usize = 4;

/// What cuts text into tokens: international tokens, mteval-v14.
#[derive(Debug)]
pub(crate) struct Bleu {
    /// A mark behind what is no digit; one before; a symbol.
    cuts: [(Regex, &'static str); 3],
}

impl Bleu {
    pub(crate) fn new() -> Bleu {
        let pattern = |text| Regex::new(text).expect("the pattern is valid");
        let cuts = [
            (pattern(r"(\P{N})(\p{P})"), "$1 $2 "),
            (pattern(r"(\p{P})(\P{N})"), " $1 $2"),
            (pattern(r"(\p{S})"), " $1 "),
        ];
        Bleu { cuts }
    }

    fn tokens(&self, text: &str) -> Vec<String> {
        let mut text = text.trim_end().to_owned();
        for (cut, by) in &self.cuts {
            text = cut.replace_all(&text, *by).into_owned();
        }
        super::words(&text).map(str::to_owned).collect()
    }

    /// Between 0 and 1.
    pub(crate) fn of(&self, answer: &str, reference: &str) -> f64 {
        let (answer, reference) = (self.tokens(answer), self.tokens(reference));
        // A missing order has no precision, and the geometric mean none with it.
        if answer.len() < ORDERS {
            return 0.0;
        }
        let (mut logs, mut smooth, mut any) = (0.0, 1.0, false);
        for order in 1..=ORDERS {
            let total = answer.len() + 1 - order;
            let correct = matches(&answer, &reference, order);
            any |= correct > 0;
            let precision = if correct > 0 {
                correct as f64 / total as f64
            } else {
                smooth *= 2.0;
                1.0 / (smooth * total as f64)
            };
            logs += precision.ln();
        }
        if !any {
            return 0.0;
        }
        let lengths = reference.len() as f64 / answer.len() as f64;
        let brevity = if lengths > 1.0 { (1.0 - lengths).exp() } else { 1.0 };
        brevity * (logs / ORDERS as f64).exp()
    }
}

/// N-grams that both have, each at most as often as the reference has it.
fn matches(answer: &[String], reference: &[String], order: usize) -> usize {
    let mut left: HashMap<&[String], usize> = HashMap::new();
    reference.windows(order).for_each(|ngram| *left.entry(ngram).or_default() += 1);
    let take = |ngram: &&[String]| match left.get_mut(*ngram) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    };
    answer.windows(order).filter(take).count()
}

#[cfg(test)]
mod tests {
    use super::Bleu;

    #[test]
    fn marks_and_symbols_stand_alone_but_not_in_numbers() {
        let tokens = |text| Bleu::new().tokens(text).join("|");
        assert_eq!(tokens("It's $1,000.50 (net), or 3%."), "It|'|s|$|1,000.50|(|net|)|,|or|3|%|.");
        assert_eq!(tokens("a+b=c  "), "a|+|b|=|c");
    }

    /// Each by hand from the definition.
    #[test]
    fn known_pairs() {
        let bleu = Bleu::new();
        let near = |answer, reference, wanted: f64| {
            let found = bleu.of(answer, reference);
            assert!((found - wanted).abs() < 1e-12, "{answer}: {found}, not {wanted}");
        };
        near("the cat sat down .", "the cat sat down .", 1.0);
        // 4 of 5, 2 of 4, smoothed 1/2 of 3 and 1/4 of 2.
        let product: f64 = (4.0 / 5.0) * (2.0 / 4.0) * (1.0 / 6.0) * (1.0 / 8.0);
        near("the cat lay down now", "the cat sat down now", product.powf(0.25));
        // All n-grams match, four tokens of eight.
        near("a b c d", "a b c d e f g h", (-1.0f64).exp());
        // One of four, smoothed 1/2 of 3, 1/4 of 2, 1/8 of 1: what the reference has once counts once.
        let product: f64 = (1.0 / 4.0) * (1.0 / 6.0) * (1.0 / 8.0) * (1.0 / 8.0);
        near("a a a a", "a b c d", product.powf(0.25));
        near("a b c", "a b c", 0.0);
        near("w x y z", "a b c d", 0.0);
        near("", "a b c d", 0.0);
        near("The cat sat down.", "the cat sat down.", {
            let product: f64 = (4.0 / 5.0) * (3.0 / 4.0) * (2.0 / 3.0) * (1.0 / 2.0);
            product.powf(0.25)
        });
    }
}
