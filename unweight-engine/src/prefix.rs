//! Shares the pages of equal prompt prefixes between sequences.
//!
//! ```text
//! (root) -- tokens 0..C --> node, C / 64 pages -- tokens C..2C --> node -- tokens 2C..2C + C / 2 --> node -- ...
//! ```
//! A node is a chunk of a prompt, or half of one, as [`Cut`] cuts prompts. Its tokens follow those of its ancestors.
//! Prefill of a prompt that is cut in the same way and starts with the tokens of cached nodes starts after these nodes.
//! Its later chunks have the same rows as without the cache. Its logits therefore have the same bits, unless a node was
//! computed in smaller pieces. Tokens are compared, not their digests.

use std::{collections::HashMap, ops::Range, sync::Arc};

use crate::pages::PAGE_TOKENS;

/// How prefill cuts prompts: into chunks, and the rest into halves of chunks.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    chunk: u32,
}

impl Cut {
    /// Cuts into chunks of `chunk` tokens, a multiple of [`PAGE_TOKENS`].
    pub fn new(chunk: u32) -> Self {
        Self { chunk: chunk.max(PAGE_TOKENS) }
    }

    /// The number of tokens of a chunk.
    pub fn chunk(self) -> u32 {
        self.chunk
    }

    /// The number of tokens of a chunk divided by `divisor`, rounded up to whole pages.
    pub fn fraction(self, divisor: u32) -> u32 {
        (self.chunk / divisor).next_multiple_of(PAGE_TOKENS)
    }

    /// Returns the tokens to run next, of the remaining tokens `start..len`.
    pub fn next(self, start: u32, len: u32) -> Range<u32> {
        let tokens = if len - start >= self.chunk { self.chunk } else { self.fraction(2) };
        start..len.min(start + tokens)
    }

    /// Returns the pieces of a prompt of `len` tokens that other prompts can share.
    fn nodes(self, len: u32) -> impl Iterator<Item = Range<u32>> {
        let following = move |before: &Range<u32>| Some(self.next(before.end, len));
        let all = std::iter::successors(Some(self.next(0, len)), following).take_while(|next| !next.is_empty());
        all.filter(move |next| next.len() as u32 >= self.fraction(2))
    }
}

/// Identifies a node of one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(usize);

/// The parent node and the tokens of a chunk.
type Key = (Option<NodeId>, Arc<[u32]>);

#[derive(Debug)]
struct Node {
    key: Key,
    pages: Vec<u32>,
    /// The number of sequences that read its pages.
    users: u32,
    children: u32,
    /// The clock when a sequence last acquired or released the node.
    used: u64,
}

impl Node {
    /// The number of its pages if no sequence reads them, else 0.
    fn idle_pages(&self) -> u32 {
        if self.users == 0 { self.pages.len() as u32 } else { 0 }
    }
}

/// Shared pages, indexed by the tokens that they hold.
#[derive(Debug)]
pub struct PrefixCache {
    cut: Cut,
    nodes: Vec<Option<Node>>,
    /// Unused indices of `nodes`.
    vacant: Vec<usize>,
    index: HashMap<Key, NodeId>,
    clock: u64,
    /// [`PrefixCache::idle_pages`], stored because every step reads it.
    idle: u32,
}

impl PrefixCache {
    /// An empty cache for prompts that `cut` cuts.
    pub fn new(cut: Cut) -> Self {
        Self { cut, nodes: Vec::new(), vacant: Vec::new(), index: HashMap::new(), clock: 0, idle: 0 }
    }

    /// Returns the nodes of the longest cached prefix of a prompt. At least one token of the prompt follows them,
    /// because its logits must be computed.
    pub fn find(&self, prompt: &[u32]) -> Vec<NodeId> {
        let mut found = Vec::new();
        for at in self.cut.nodes(prompt.len() as u32) {
            let (start, end) = (at.start as usize, at.end as usize);
            let node = self.index.get(&(found.last().copied(), prompt[start..end].into()));
            let Some(node) = node.filter(|_| end < prompt.len()) else { break };
            found.push(*node);
        }
        found
    }

    /// A number that changes whenever [`PrefixCache::find`] may find other nodes.
    pub fn version(&self) -> u64 {
        self.clock
    }

    /// The number of pages of these nodes.
    pub fn pages_of(&self, nodes: &[NodeId]) -> u32 {
        nodes.iter().filter_map(|node| self.nodes.get(node.0)?.as_ref()).map(|node| node.pages.len() as u32).sum()
    }

    /// The pages of these nodes, in the order of their tokens.
    pub fn pages(&self, nodes: &[NodeId]) -> Vec<u32> {
        nodes.iter().filter_map(|node| self.nodes.get(node.0)?.as_ref()).flat_map(|node| node.pages.clone()).collect()
    }

    /// Notes that a sequence reads these nodes.
    pub fn hold(&mut self, nodes: &[NodeId]) {
        self.update_users(nodes, |users| users + 1);
    }

    /// Notes that a sequence no longer reads these nodes. They stay until their pages are needed.
    pub fn release(&mut self, nodes: &[NodeId]) {
        self.update_users(nodes, |users| users.saturating_sub(1));
    }

    fn update_users(&mut self, nodes: &[NodeId], users: impl Fn(u32) -> u32) {
        self.clock += 1;
        for id in nodes {
            if let Some(node) = self.nodes.get_mut(id.0).and_then(Option::as_mut) {
                self.idle -= node.idle_pages();
                (node.users, node.used) = (users(node.users), self.clock);
                self.idle += node.idle_pages();
            }
        }
    }

    /// Adds the chunks of a prompt after the nodes `held`; `pages` are those of the whole prompt. The sequence that
    /// computed them holds the new nodes. From the first chunk that the cache already has, pages stay with the
    /// sequence.
    pub fn insert(&mut self, held: &mut Vec<NodeId>, prompt: &[u32], pages: &[u32]) {
        for at in self.cut.nodes(prompt.len() as u32).skip(held.len()) {
            let key: Key = (held.last().copied(), prompt[at.start as usize..at.end as usize].into());
            if self.index.contains_key(&key) {
                break;
            }
            let [first, end] = [at.start, at.end].map(|token| (token / PAGE_TOKENS) as usize);
            held.push(self.add(key, pages[first..end].to_vec()));
        }
    }

    fn add(&mut self, key: Key, pages: Vec<u32>) -> NodeId {
        self.clock += 1;
        let node = Node { key: key.clone(), pages, users: 1, children: 0, used: self.clock };
        let at = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.nodes.len() - 1
        });
        self.nodes[at] = Some(node);
        if let Some(parent) = key.0.and_then(|parent| self.nodes.get_mut(parent.0)?.as_mut()) {
            parent.children += 1;
        }
        self.index.insert(key, NodeId(at));
        NodeId(at)
    }

    /// The number of pages that no sequence reads. A sequence that reads a node reads its ancestors, so all of these
    /// pages can be evicted.
    pub fn idle_pages(&self) -> u32 {
        debug_assert_eq!(self.idle, self.nodes.iter().flatten().map(Node::idle_pages).sum::<u32>());
        self.idle
    }

    /// The pages of all nodes.
    #[cfg(test)]
    pub fn all_pages(&self) -> Vec<u32> {
        self.nodes.iter().flatten().flat_map(|node| node.pages.clone()).collect()
    }

    /// The number of pages of these nodes that no sequence reads.
    pub fn idle_of(&self, nodes: &[NodeId]) -> u32 {
        nodes.iter().filter_map(|node| self.nodes.get(node.0)?.as_ref()).map(Node::idle_pages).sum()
    }

    /// Evicts nodes that no sequence reads, least recently used first, until they free at least `count` pages or none
    /// is left. Returns their pages.
    pub fn evict(&mut self, count: u32) -> Vec<u32> {
        let mut pages = Vec::new();
        while pages.len() < count as usize {
            let leaves = self.nodes.iter().enumerate().filter_map(|(at, node)| Some((at, node.as_ref()?)));
            let idle = leaves.filter(|(_, node)| node.users == 0 && node.children == 0);
            let Some(at) = idle.min_by_key(|(_, node)| node.used).map(|(at, _)| at) else { break };
            let Some(node) = self.nodes[at].take() else { break };
            self.idle -= node.idle_pages();
            self.vacant.push(at);
            self.index.remove(&node.key);
            self.clock += 1;
            if let Some(parent) = node.key.0.and_then(|parent| self.nodes.get_mut(parent.0)?.as_mut()) {
                parent.children -= 1;
            }
            pages.extend(node.pages);
        }
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of `pages` pages, all of them `token`.
    fn text(pages: usize, token: u32) -> Vec<u32> {
        vec![token; pages * PAGE_TOKENS as usize]
    }

    /// Adds a prompt of whole pages and one more token.
    fn insert(cache: &mut PrefixCache, prompt: &[Vec<u32>], pages: &[u32]) -> Vec<NodeId> {
        let prompt = [&prompt.concat()[..], &[0]].concat();
        let mut held = cache.find(&prompt);
        cache.hold(&held);
        cache.insert(&mut held, &prompt, pages);
        held
    }

    #[test]
    fn prompts_are_cut_at_chunks_and_halves() {
        let all = |chunk, len| {
            let cut = Cut::new(chunk);
            let next = move |before: &Range<u32>| Some(cut.next(before.end, len)).filter(|next| !next.is_empty());
            std::iter::successors(Some(cut.next(0, len)), next).map(|next| next.end).collect::<Vec<_>>()
        };
        assert_eq!(all(1024, 2048), [1024, 2048]);
        assert_eq!(all(1024, 2700), [1024, 2048, 2560, 2700]);
        assert_eq!(all(1024, 512), [512]);
        assert_eq!(all(64, 130), [64, 128, 130]);
        assert_eq!(all(192, 191), [128, 191]);
        assert_eq!([1, 2, 3, 4].map(|divisor| Cut::new(192).fraction(divisor)), [192, 128, 64, 64]);
    }

    #[test]
    fn longest_prefix_is_found() {
        let mut cache = PrefixCache::new(Cut::new(128));
        let [one, two, three] = [text(2, 1), text(1, 2), text(1, 3)];
        let held = insert(&mut cache, &[one.clone(), two.clone()], &[10, 11, 12, 13]);
        assert_eq!((held.len(), cache.pages(&held), cache.pages_of(&held)), (2, vec![10, 11, 12], 3));
        assert_eq!(insert(&mut cache, &[one.clone(), two.clone()], &[20, 21, 22, 23]), held, "once");
        let other = insert(&mut cache, &[one.clone(), three.clone()], &[10, 11, 30, 31]);
        assert_eq!((other[0], cache.pages(&other)), (held[0], vec![10, 11, 30]));
        let find = |texts: &[&[u32]]| cache.find(&texts.concat());
        assert_eq!(find(&[&one, &two, &[9]]), held);
        assert_eq!(find(&[&one, &two]), held[..1], "the last token must be computed");
        assert_eq!(find(&[&one, &[9]]), held[..1]);
        assert_eq!(find(&[&one, &two, &two, &[9]]), held[..1], "this prompt has a chunk where the other has a half");
        assert_eq!(find(&[&two, &one]), []);
        assert_eq!((cache.find(&[]), cache.find(&[1])), (vec![], vec![]));
    }

    #[test]
    fn the_least_recently_used_leaves_are_evicted() {
        let mut cache = PrefixCache::new(Cut::new(64));
        let both = insert(&mut cache, &[text(1, 1), text(1, 2)], &[10, 11, 14]);
        let other = insert(&mut cache, &[text(1, 3)], &[12, 14]);
        assert_eq!((cache.idle_pages(), cache.evict(9)), (0, vec![]), "all nodes are in use");
        cache.release(&other);
        cache.release(&both);
        assert_eq!((cache.idle_pages(), cache.idle_of(&other)), (3, 1));
        cache.hold(&both[..1]);
        assert_eq!((cache.idle_pages(), cache.evict(1)), (2, vec![12]));
        assert_eq!(cache.evict(9), [11], "the first node is in use");
        cache.release(&both[..1]);
        assert_eq!(cache.evict(1), [10]);
        assert_eq!((cache.find(&text(3, 1)), cache.idle_pages()), (vec![], 0));
        let again = insert(&mut cache, &[text(1, 4)], &[14, 15]);
        assert_eq!(cache.pages(&again), [14]);
    }
}
