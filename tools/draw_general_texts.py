"""The words on the pictures of `calib/general`, in six languages and four scripts. Names, firms, addresses and prices are made up.

Every sentence was written for this set.
"""

from __future__ import annotations

SCRIPTS = {"en": "latin", "de": "latin", "fr": "latin", "zh": "chinese", "ar": "arabic", "ru": "cyrillic"}

PEOPLE = {
    "en": ["Nora Fairweather", "Tobias Lund", "Grace Okonedo", "Miles Hartwell", "Ivy Penhallow", "Samuel Brandt", "Leah Whitcombe"],
    "de": ["Jürgen Möhrle", "Käthe Sößner", "Lukas Überfeld", "Anke Brüggemann", "Till Wäscher", "Friederike Voß"],
    "fr": ["Élodie Garnier", "Benoît Lefèvre", "Anaïs Crémieux", "Gaël Thévenot", "Océane Dubœuf", "Rémi Châtelain"],
    "zh": ["林晓雨", "周志远", "陈思涵", "欧阳建国", "赵文博", "许嘉宁"],
    "ar": ["ليلى الحداد", "يوسف الخطيب", "سلمى عبد الله", "كريم النجار", "هدى الصباغ", "عمر البستاني"],
    "ru": ["Анна Щербакова", "Игорь Лебедев", "Юлия Ковалёва", "Пётр Жданов", "Ольга Ёлкина", "Максим Цветков"],
}

FIRMS = {
    "en": ["Harbour & Quill", "Northgate Tools", "Maple Lane Foods", "Bright Kettle Co.", "Fern Valley Clinic", "Copperfield Supplies"],
    "de": ["Möwe Bürobedarf GmbH", "Grünwald Werkzeuge", "Bäckerei Süßkind", "Küstenlicht AG", "Praxis Dr. Hölzle"],
    "fr": ["Boulangerie du Pré", "Atelier Fenêtre", "Librairie l'Étoile", "Menuiserie Chêne", "Café des Glaïeuls"],
    "zh": ["青禾书店", "东港电子有限公司", "云山茶叶行", "晨光面包房", "海棠诊所"],
    "ar": ["مكتبة النخيل", "مخبز الياسمين", "شركة الساحل للتجارة", "عيادة الواحة", "مقهى القمر"],
    "ru": ["ООО «Северный мост»", "Пекарня «Колос»", "Книги у реки", "Аптека «Ромашка»", "Мастерская «Ключ»"],
}

CITIES = {
    "en": ["Eastmoor", "Port Linden", "Ashby Falls", "Greyhaven", "Stonewick", "Millbrook"],
    "de": ["Oberlinden", "Süderhagen", "Neukürten", "Weißbach", "Grömitzau", "Altmühle"],
    "fr": ["Saint-Élan", "Montfleury", "Villeneuve-le-Gué", "Port-Aubry", "Châtelneuf", "Roquebelle"],
    "zh": ["青川", "临江", "云州", "南浦", "石桥", "东陵"],
    "ar": ["الواحة", "ميناء النور", "تل الزيتون", "وادي القمح", "رأس الصخر", "عين الورد"],
    "ru": ["Заречье", "Новоозёрск", "Белокамень", "Липовка", "Верхнеярск", "Солнечный"],
}

GOODS = {
    "en": (
        "Rye bread|Oat milk 1 l|Apples 1 kg|Green tea|Notebook A5|AA batteries x4|Olive oil|Paper towels|Tomato soup|Blue ink|Light bulb|Honey 250 g"
    ),
    "de": "Roggenbrot|Hafermilch 1 l|Äpfel 1 kg|Grüner Tee|Heft A5|Käse am Stück|Öl 0,5 l|Küchenrolle|Brühe|Füllertinte|Glühbirne|Müsli 500 g",
    "fr": "Baguette|Lait d'avoine|Pommes 1 kg|Thé vert|Cahier A5|Crème fraîche|Huile d'olive|Pâtes 500 g|Soupe|Encre bleue|Ampoule|Miel de forêt",
    "zh": "全麦面包|燕麦奶|苹果一公斤|绿茶|笔记本|五号电池|橄榄油|厨房纸巾|番茄汤料|蓝色墨水|灯泡|蜂蜜",
    "ar": "خبز القمح|حليب الشوفان|تفاح كيلو|شاي أخضر|دفتر صغير|بطاريات|زيت زيتون|مناديل ورقية|شوربة طماطم|حبر أزرق|مصباح|عسل طبيعي",
    "ru": "Хлеб ржаной|Овсяное молоко|Яблоки 1 кг|Чай зелёный|Тетрадь|Батарейки|Масло оливковое|Полотенца|Суп томатный|Чернила|Лампочка|Мёд 250 г",
}

MONTHS = {
    "en": "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec",
    "de": "Jan.|Feb.|März|April|Mai|Juni|Juli|Aug.|Sept.|Okt.|Nov.|Dez.",
    "fr": "janv.|févr.|mars|avr.|mai|juin|juil.|août|sept.|oct.|nov.|déc.",
    "zh": "1月|2月|3月|4月|5月|6月|7月|8月|9月|10月|11月|12月",
    "ar": "يناير|فبراير|مارس|أبريل|مايو|يونيو|يوليو|أغسطس|سبتمبر|أكتوبر|نوفمبر|ديسمبر",
    "ru": "янв.|февр.|март|апр.|май|июнь|июль|авг.|сент.|окт.|нояб.|дек.",
}

TITLES = {
    "en": "Repairing the old harbour wall|A quieter winter for the orchards|Minutes of the garden club|How the "
    "night bus was saved|Storing rain in clay jars|"
    "What the bakers learned this spring",
    "de": (
        "Die Brücke wird geprüft|Ein stiller Winter im Obstgarten|Protokoll des Gartenvereins|Wie der "
        "Nachtbus gerettet wurde|Bücher für alle Stadtteile"
    ),
    "fr": "Le vieux quai se répare|Un hiver calme au verger|Compte rendu du club|Comment le bus de nuit fut sauvé|Des livres pour chaque quartier",
    "zh": "老码头的修缮计划|果园里安静的冬天|社区花园会议纪要|夜班公交是怎样保留下来的|图书馆的新书架",
    "ar": "ترميم رصيف الميناء القديم|شتاء هادئ في البساتين|محضر اجتماع نادي الحديقة|كيف عادت حافلة الليل|كتب لكل حي",
    "ru": "Ремонт старой набережной|Тихая зима в саду|Протокол собрания садоводов|Как сохранили ночной автобус|Книги для каждого района",
}

SENTENCES = {
    "en": [
        "The work began before sunrise, because the tide leaves only four hours in which the lower stones are dry.",
        "Nobody had measured the wall since the storm, and the first drawing turned out to be two metres too short.",
        "Members who cannot attend may send a written answer until Friday noon.",
        "We thank the neighbours who lent ladders, lamps and, on two evenings, their kitchens.",
        "A second quotation was lower, but it did not include the removal of the old pipes.",
        "Please keep this letter with your contract; it replaces the one sent in spring.",
        "The figures in the annex were checked twice and differ from last year by less than three per cent.",
        "Rain is collected on the roof, led through sand and stored in jars that hold ninety litres each.",
        "Whoever finds a lost key should hand it to the porter, who keeps a list by the door.",
        "The committee asked for a plan that a stranger could follow without calling anybody.",
        "Delivery takes five working days; larger orders are brought on a pallet to the rear gate.",
        "Half of the trees were pruned in November and the other half will be left alone to compare.",
        "The night bus will stop at the mill again, though only when someone presses the button.",
        "All prices include packaging, and empty crates are taken back at full value.",
    ],
    "de": [
        "Die Arbeiten begannen vor Sonnenaufgang, weil das Wasser nur vier Stunden lang tief genug steht.",
        "Seit dem Sturm hatte niemand die Mauer gemessen, und die erste Zeichnung war zwei Meter zu kurz.",
        "Wer nicht kommen kann, schickt seine Antwort bitte schriftlich bis Freitagmittag.",
        "Ein zweites Angebot war günstiger, enthielt aber nicht den Rückbau der alten Rohre.",
        "Bitte bewahren Sie dieses Schreiben bei Ihren Unterlagen auf; es ersetzt das vom Frühjahr.",
        "Die Zahlen im Anhang wurden zweimal geprüft und weichen weniger als drei Prozent ab.",
        "Größere Bestellungen bringen wir auf einer Palette an das hintere Tor.",
        "Der Nachtbus hält wieder an der Mühle, allerdings nur auf Knopfdruck.",
    ],
    "fr": [
        "Les travaux ont commencé avant l'aube, car la marée ne laisse que quatre heures au sec.",
        "Depuis la tempête, personne n'avait mesuré le mur, et le premier dessin était trop court de deux mètres.",
        "Les membres absents peuvent répondre par écrit jusqu'à vendredi midi.",
        "Un second devis était plus bas, mais n'incluait pas l'enlèvement des vieux tuyaux.",
        "Veuillez garder cette lettre avec votre contrat ; elle remplace celle du printemps.",
        "Les chiffres de l'annexe ont été vérifiés deux fois et diffèrent de moins de trois pour cent.",
        "Les grandes commandes sont livrées sur palette à la porte arrière.",
        "Le bus de nuit s'arrêtera de nouveau au moulin, à la demande seulement.",
    ],
    "zh": [
        "工程在日出之前开始,因为退潮以后只有四个小时可以施工。",
        "暴风雨之后没有人再测量过这段墙,第一张图纸短了两米。",
        "不能到场的会员请在星期五中午以前寄来书面答复。",
        "第二份报价更低,但不包括拆除旧水管的费用。",
        "请将本函与合同一并保存,它取代春季寄出的那一份。",
        "附录中的数字经过两次核对,与去年相差不到百分之三。",
        "雨水从屋顶收集,经过细沙过滤,存放在九十升的陶缸里。",
        "较大的订单将用托盘送到后门,送货需要五个工作日。",
        "夜班车又会在磨坊停靠,不过只有按铃才停。",
        "感谢借出梯子和灯具的邻居们,也感谢两位厨师。",
    ],
    "ar": [
        "بدأ العمل قبل شروق الشمس لأن المد لا يترك سوى أربع ساعات جافة.",
        "لم يقس أحد الجدار منذ العاصفة، وكان الرسم الأول أقصر بمترين.",
        "على من لا يستطيع الحضور أن يرسل جوابه مكتوبا قبل ظهر الجمعة.",
        "كان العرض الثاني أقل ثمنا، لكنه لا يشمل إزالة الأنابيب القديمة.",
        "نرجو حفظ هذه الرسالة مع العقد فهي تحل محل رسالة الربيع.",
        "راجعنا الأرقام في الملحق مرتين، والفرق أقل من ثلاثة في المئة.",
        "تجمع مياه المطر من السطح وتمر عبر الرمل ثم تخزن في جرار كبيرة.",
        "تصل الطلبات الكبيرة إلى الباب الخلفي خلال خمسة أيام عمل.",
        "ستقف حافلة الليل عند المطحنة من جديد إذا ضغط أحد الزر.",
        "نشكر الجيران الذين أعارونا السلالم والمصابيح.",
    ],
    "ru": [
        "Работы начались до рассвета, потому что отлив оставляет сухими камни лишь на четыре часа.",
        "После бури стену никто не измерял, и первый чертёж оказался на два метра короче.",
        "Кто не может прийти, пусть пришлёт письменный ответ до полудня пятницы.",
        "Второе предложение было дешевле, но не включало демонтаж старых труб.",
        "Просим хранить это письмо вместе с договором: оно заменяет весеннее.",
        "Цифры в приложении проверены дважды и отличаются менее чем на три процента.",
        "Дождевую воду собирают с крыши, пропускают через песок и хранят в кувшинах.",
        "Крупные заказы привозят на поддоне к задним воротам за пять рабочих дней.",
        "Ночной автобус снова остановится у мельницы, но только по требованию.",
        "Благодарим соседей, одолживших нам лестницы и фонари.",
    ],
}

EVENTS = {
    "en": [
        "{who} ordered {n} pieces of “{what}” for {price} and collected them in {where}.",
        "On {day} the depot at {where} counted {n} crates, of which {who} signed for half.",
        "The share of {where} rose to {price}, while “{what}” was no longer listed.",
        "{who} reported from {where} that {n} visitors had asked about the new opening hours.",
    ],
    "de": [
        "{who} bestellte {n} Stück „{what}“ für {price} und holte sie in {where} ab.",
        "Am {day} zählte das Lager in {where} {n} Kisten; {who} hat unterschrieben.",
        "Der Anteil von {where} stieg auf {price}, „{what}“ entfällt künftig.",
        "{who} meldete aus {where}, dass {n} Gäste nach den Öffnungszeiten fragten.",
    ],
    "fr": [
        "{who} a commandé {n} unités de « {what} » pour {price}, à retirer à {where}.",
        "Le {day}, le dépôt de {where} a compté {n} caisses, signées par {who}.",
        "La part de {where} monte à {price} ; « {what} » n'est plus au catalogue.",
        "{who} signale depuis {where} que {n} visiteurs ont demandé les horaires.",
    ],
    "zh": [
        "{who}在{where}订购了{n}份“{what}”,共付{price}。",
        "{day},{where}仓库清点了{n}箱货物,由{who}签收。",
        "{where}的份额上升到{price},“{what}”不再列入目录。",
        "{who}从{where}来信说,有{n}位客人询问新的开放时间。",
    ],
    "ar": [
        "طلب المشتري {n} قطعة من «{what}» بمبلغ {price} في {where}.",
        "في يوم {day} أحصى مخزن {where} {n} صندوقا باسم {who}.",
        "ارتفعت حصة {where} إلى {price} ولم يعد «{what}» في القائمة.",
        "جاء في رسالة {who} من {where} أن {n} زائرا سألوا عن المواعيد.",
    ],
    "ru": [
        "{who}: заказ на {n} шт. «{what}», {price}, выдача — {where}.",
        "По состоянию на {day} склад ({where}) насчитал {n} ящиков; отвечает {who}.",
        "Доля города {where} выросла до {price}, а «{what}» больше не заказывают.",
        "Из города {where} сообщают: {n} посетителей спросили о новых часах работы.",
    ],
}
"""Sentences with holes: `who`, `where`, `what`, `price`, `n` and `day` are drawn for every picture."""


def goods(lang: str) -> list[str]:
    return GOODS[lang].split("|")


def months(lang: str) -> list[str]:
    return MONTHS[lang].split("|")


def titles(lang: str) -> list[str]:
    return TITLES[lang].split("|")
