//! A SentencePiece vocabulary (pieces with scores) as BPE.
//!
//! SentencePiece joins the two neighbours whose joint piece has the best score, until none is left. BPE does the same
//! with a list of merges, so the list is every way to cut a piece in two pieces, best score first.

use crate::model::gguf::Strings;
use std::cmp::Reverse;
use std::collections::HashMap;

/// The merges that follow from `tokens` and their scores. Only tokens for which `is_text` holds take part.
pub(super) fn merges(
    tokens: &Strings,
    scores: &[f32],
    is_text: impl Fn(usize) -> bool,
) -> Vec<(String, String)> {
    let ids: HashMap<&str, usize> = tokens
        .iter()
        .enumerate()
        .filter(|&(id, _)| is_text(id))
        .map(|(id, token)| (token, id))
        .collect();
    let mut merges = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|&(id, _)| is_text(id)) {
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if ids.contains_key(left) && ids.contains_key(right) {
                merges.push((id, left, right));
            }
        }
    }
    // Equal scores: the longer left part first, then the lower id, so that the order is total.
    merges.sort_by(|&(a, a_left, _), &(b, b_left, _)| {
        let order = scores[b].total_cmp(&scores[a]);
        order.then(Reverse(a_left.len()).cmp(&Reverse(b_left.len()))).then(a.cmp(&b))
    });
    merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_come_best_score_first() {
        let tokens: Strings = ["a", "b", "c", "ab", "bc", "abc", "<s>"].into_iter().collect();
        let scores = [-1., -2., -3., -5., -4., -6., 0.];
        let merges = merges(&tokens, &scores, |id| id != 6);
        let shown: Vec<String> =
            merges.iter().map(|(left, right)| format!("{left}+{right}")).collect();
        assert_eq!(shown, ["b+c", "a+b", "ab+c", "a+bc"]);
    }
}
